"""The end of a process group, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, itertools, os, sys, threading, time
from pathlib import Path

parent = os.getpid()
# Before the import of meshrec, and so called after what that registers.
atexit.register(lambda: os.getpid() == parent or print("at the end:", threads()))

import torch
import torch._dynamo  # seconds that each child would need
import torch.distributed as dist
import torch.distributed.fsdp

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=4, feature_names=["f"])]
        )
        self.over = torch.nn.Linear(4, 2)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def linger(_):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.5)


def lingering(_, bucket):
    "Averages gradients; gloo's thread is still at it when the backward pass is over."
    time.sleep(0.3 * rank)
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    averaged = summed.then(lambda future: future.value()[0].div_(2))
    averaged.add_done_callback(linger)
    return averaged


def threads():
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def plain():
    "DDP as any program has it; it knows nothing of MeshRec's end of a group."
    store = dist.FileStore(f"{folder}/store of {dense}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    print("during:", len(threads()) > 0)
    dist.destroy_process_group()


def work():
    store = dist.FileStore(f"{folder}/store of {dense}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedModelParallel(Model(), dense=dense)
    if dense == "ddp":
        model.register_comm_hook(None, lingering)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 5, 9]), lengths=torch.tensor([2, 1]))
    model(features).sum().backward()
    print("during:", len(threads()) > 0)
    md.leave_process_group()


folder, ranks = sys.argv[1], {}
for dense, rank in itertools.product(["ddp", "fsdp2", "plain"], range(2)):
    child = os.fork()  # it ends as any program does, and need not import everything
    if child == 0:
        output = os.open(f"{folder}/{dense} {rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        plain() if dense == "plain" else work()
        sys.exit()
    ranks[child] = f"{dense} {rank}"
for child, name in ranks.items():
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"{name}: {code}")
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are found in Linux's /proc")
def test_no_thread_of_the_group_outlives_the_interpreter(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    ranks = [f"{dense} {rank}" for dense in ("ddp", "fsdp2", "plain") for rank in range(2)]
    said = {rank: (tmp_path / rank).read_text() for rank in ranks}
    assert done.stdout.splitlines() == [f"{rank}: 0" for rank in ranks], (done.stderr, said)
    assert said == dict.fromkeys(ranks, "during: True\nat the end: []\n")
