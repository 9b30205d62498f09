"""Children of a Jupyter kernel, in a real one."""

import pytest

nbformat = pytest.importorskip("nbformat", reason="`make docs` installs it")
nbclient = pytest.importorskip("nbclient", reason="`make docs` installs it")
pytest.importorskip("ipykernel", reason="`make docs` installs it")

# As TorchRec's tutorial starts its processes: Jupyter needs `multiprocess`, which pickles functions of cells.
CELLS = [
    "import meshrec.compat.torchrec\nmeshrec.compat.torchrec.install(force=True)",
    "import multiprocess\nimport torchrec",
    """
def child(queue):
    import torchrec
    queue.put((torchrec.EmbeddingBagCollection.__module__, torchrec.__spec__.origin))
""",
    """
context = multiprocess.get_context("spawn")
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
found = queue.get(timeout=100)
process.join()
assert process.exitcode == 0
print(found == (torchrec.EmbeddingBagCollection.__module__, "meshrec.compat.torchrec"))
""",
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_processes_of_a_notebook_have_the_bridge():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute()
    (output,) = notebook.cells[-1].outputs
    assert output["text"] == "True\n"
