"""The rules of the house: imports point downward, classes are shallow, each file has its test."""

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from meshrec.ops import library

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshrec"
MAX_DEPTH = 2
MAX_FUNCTION_LINES = 60
LONGER_FUNCTIONS = {
    "distributed.sharded_tables.__init__",
    "export.package.export",
    "ops.dist.triton.route_ids",  # kernels with their launch
    "ops.dist.wire_triton_kernels.encode_rows",
}

# From the ground up. A room imports rooms below it, and of its own floor those that do not import it back.
# Operations know tensors only; the sparse types permute and split themselves with them, and so stand above.
# Durable files know nothing of tensors or models; their checksums are computed by a kernel.
FLOORS = [
    {"lazy", "interpreter"},
    {"ops"},
    {"durable"},
    {"sparse"},
    {"optim"},
    {"tables"},
    {"modules"},
    {"plan", "comms.wire"},
    {"comms"},
    {"distributed"},
    {"reports"},
    {"planner"},
    {"planner.calibration"},
    {"model_parallel"},
    {"pipeline", "stages"},
    {"models", "data", "metrics", "testing", "checkpoint"},
    {"train"},
    {"quant"},
    {"export"},
    {"runs"},
    {"cluster", "train.ray"},
    {"serve"},
    {"compat"},
    {"cli"},
    {"estimators"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The planner may run on a machine that trains nothing: it reads plans as data, and nothing of the run time.
# Wire formats know tensors only, so that it can price what the run time sends.
PLANNER_LEAVES = {"comms", "distributed", "tables"}

# Which tests cover which C++ source: several sources may serve one op, so the names cannot say it.
TBE_TESTS = [
    f"tests/ops/tbe/{name}.py" for name in ("test_kernels", "test_kernels_update", "test_kernels_errors")
]
DIST_TESTS = ["tests/ops/dist/test_naive.py"]
NBIT_TESTS = ["tests/ops/nbit/test_kernels.py", "tests/ops/nbit/test_naive.py"]
INDEX_TESTS = [f"tests/ops/index/test_{name}.py" for name in ("kernels", "naive", "slots")]
CPP_TESTS = {
    "attention.cpp": ["tests/ops/attention/test_jagged_attention.py"],
    "anneal.cpp": ["tests/ops/test_planning.py"],
    "average.cpp": ["tests/ops/dist/test_average.py"],
    "batch.cpp": TBE_TESTS,
    "choose.cpp": TBE_TESTS,
    "crc32.cpp": ["tests/ops/test_checksums.py"],
    "first_rows.cpp": ["tests/ops/test_initial_rows.py"],
    "fused_update.cpp": TBE_TESTS,
    "gather.cpp": DIST_TESTS,
    "hash_index.cpp": INDEX_TESTS,
    "mix.cpp": INDEX_TESTS,
    "host_link.cpp": ["tests/comms/test_host_link.py"],
    "keyed.cpp": ["tests/ops/keyed/test_keyed.py"],
    "io_threads.cpp": ["tests/ops/records/test_records.py"],
    "interaction.cpp": ["tests/ops/interaction/test_naive.py"],
    "jagged.cpp": ["tests/ops/jagged/test_kernels.py"],
    "kernels_avx2.cpp": TBE_TESTS,
    "kernels_avx512.cpp": TBE_TESTS,
    "kernels_baseline.cpp": TBE_TESTS,
    "mapping.cpp": ["tests/ops/test_mapping.py"],
    "marked.cpp": ["tests/ops/index/test_marked.py"],
    "memory.cpp": ["tests/ops/test_memory.py"],
    "nbit.cpp": NBIT_TESTS,
    "pooled_forward.cpp": TBE_TESTS,
    "predict.cpp": ["tests/export/test_runtime.py"],
    "predictor.cpp": ["tests/export/test_runtime.py"],
    "records.cpp": ["tests/ops/records/test_records.py"],
    "ring.cpp": ["tests/ops/records/test_records.py"],
    "register.cpp": ["tests/test_architecture.py"],
    "route.cpp": DIST_TESTS,
    "row_sort.cpp": TBE_TESTS,
    "scores.cpp": ["tests/ops/scores/test_naive.py"],
    "runs.cpp": TBE_TESTS,
    "samples.cpp": ["tests/ops/jagged/test_samples.py"],
    **dict.fromkeys(("shard.cpp", "slots.cpp", "unique.cpp"), INDEX_TESTS),
    "verify.cpp": ["tests/export/test_runtime.py"],
    "wire.cpp": ["tests/ops/dist/test_wire.py"],
    "ids.cpp": ["tests/ops/dist/test_ids.py"],
}


class Import(NamedTuple):
    importer: str  # dotted name inside meshrec, such as "ops.tbe.naive"; "" is meshrec itself
    imported: str
    line: int


@functools.cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module. Every rule reads them, and to find them takes longer than the rules."""
    return list(ast.walk(tree))


def module_name(path: Path, root: Path = SOURCE) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports_of(tree: ast.Module, importer: str, *, is_package: bool) -> list[Import]:
    """Return every import of a part of meshrec in ``tree``, also inside functions and for type checkers."""
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["meshrec", *importer.split(".")] if importer else ["meshrec"]
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *base.split(".")]).rstrip(".")
            # `from meshrec import ops` names the room, `from meshrec import fuse` the roof.
            names = [f"{base}.{a.name}" if is_module(f"{base}.{a.name}"[8:]) else base for a in node.names]
        else:
            continue
        found += [
            Import(importer, name.removeprefix("meshrec").removeprefix("."), node.lineno)
            for name in names
            if name == "meshrec" or name.startswith("meshrec.")
        ]
    return found


def room_of(module: str) -> str:
    """The longest dotted prefix of ``module`` that stands on a floor."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    room = next((prefix for prefix in prefixes if prefix in FLOOR_OF), None)
    assert room is not None, f"{module!r} is on no floor: add its room to FLOORS"
    return room


def upward(imports: list[Import]) -> list[str]:
    wrong = []
    same_floor: dict[tuple[str, str], Import] = {}
    for each in imports:
        if not each.importer:
            continue  # the package itself shows the public names of every room
        what = f"{each.importer}:{each.line} imports meshrec.{each.imported}"
        if not each.imported:
            wrong.append(f"{what}: import the room, not the roof")
            continue
        above, below = room_of(each.importer), room_of(each.imported)
        if above == below:
            continue
        if FLOOR_OF[below] > FLOOR_OF[above]:
            wrong.append(f"{what}: upward")
        elif FLOOR_OF[below] == FLOOR_OF[above]:
            same_floor[above, below] = each
            if (below, above) in same_floor:
                wrong.append(f"{what}: and {below} imports {above}")
        elif above == "planner" and below in PLANNER_LEAVES:
            wrong.append(f"{what}: the planner reads plans, nothing of the run time")
    return wrong


def circles(imports: list[Import]) -> list[list[str]]:
    """Return the groups of files that import each other: the strongly connected components of the graph."""
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports:
        if each.importer != each.imported:  # a package may name one of its own names
            graph[each.importer].add(each.imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), set()) - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    found = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
        for name in graph
        if name in reach[name]
    }
    return sorted(map(list, found))


def class_bases(trees: dict[str, ast.Module]) -> dict[str, dict[str, list[str]]]:
    """Module -> class -> the bases that are classes of this package (by name, as the module calls them)."""
    ours = {node.name for tree in trees.values() for node in nodes_of(tree) if isinstance(node, ast.ClassDef)}
    found: dict[str, dict[str, list[str]]] = {}
    for module, tree in trees.items():
        local = {node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef)}
        for node in nodes_of(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("meshrec")):
                local |= {alias.asname or alias.name for alias in node.names}
        found[module] = {
            node.name: [
                name
                for name in (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
                if name in ours & local
            ]
            for node in nodes_of(tree)
            if isinstance(node, ast.ClassDef)
        }
    return found


def too_deep(trees: dict[str, ast.Module]) -> list[str]:
    bases = class_bases(trees)
    parents: dict[str, set[str]] = defaultdict(set)
    for classes in bases.values():
        for name, its_bases in classes.items():
            parents[name] |= set(its_bases) - {name}

    def depth(name: str, below: frozenset[str] = frozenset()) -> int:
        # Classes of the bridge have the names of their bases.
        found = parents[name] - below
        return 1 + max((depth(parent, below | {name}) for parent in found), default=0)

    return sorted(f"{name}: {depth(name)} levels" for name in list(parents) if depth(name) > MAX_DEPTH)


def long_functions(trees: dict[str, ast.Module]) -> set[str]:
    """Return the functions with too many lines of code; docstrings and comments do not count."""
    found = set()
    for module, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_docstring = ast.get_docstring(node, clean=False) is not None
                nodes = [part for child in node.body[has_docstring:] for part in ast.walk(child)]
                ends = [(part.lineno, part.end_lineno) for part in nodes if hasattr(part, "lineno")]
                lines = 1 + len({line for pair in ends for line in pair})
                if lines > MAX_FUNCTION_LINES:
                    found.add(f"{module}.{node.name}")
    return found


@functools.cache
def package_trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def package_imports() -> list[Import]:
    packages = {module_name(path) for path in SOURCE.rglob("__init__.py")}
    found = [
        each
        for module, tree in package_trees().items()
        for each in imports_of(tree, module, is_package=module in packages)
    ]
    assert found, "the walk found no import at all: it looks at the wrong folder"
    return found


def test_imports_point_downward() -> None:
    assert upward(package_imports()) == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert circles(package_imports()) == []


def test_circles_are_seen() -> None:
    def file(name: str, code: str) -> list[Import]:
        return imports_of(ast.parse(code), name, is_package=False)

    one = file("sparse.a", "from meshrec.sparse.b import f")
    other = file("sparse.b", "def f():\n    from meshrec.sparse.c import g")
    assert circles([*one, *other]) == []
    back = file("sparse.c", "import meshrec.sparse.a")
    assert circles([*one, *other, *back]) == [["sparse.a", "sparse.b", "sparse.c"]]
    for_types = file("sparse.c", "if TYPE_CHECKING:\n    import meshrec.sparse.a")
    assert circles([*one, *other, *for_types]) == [["sparse.a", "sparse.b", "sparse.c"]]


@pytest.mark.parametrize(
    ("importer", "code", "complaint"),
    [
        ("ops.library", "from meshrec.modules import EmbeddingBagCollection", "upward"),
        ("ops.library", "def f():\n    import meshrec.optim", "upward"),
        ("ops.library", "from ..modules.embedding_configs import PoolingType", "upward"),
        ("modules.mlp", "from meshrec import EmbeddingBagCollection", "not the roof"),
        ("planner.solver", "from meshrec.distributed.lookup import Lookup", "nothing of the run time"),
        ("export.package", "from meshrec.serve import server", "upward"),
    ],
)
def test_wrong_imports_are_seen(importer: str, code: str, complaint: str) -> None:
    wrong = upward(imports_of(ast.parse(code), importer, is_package=False))
    assert len(wrong) == 1
    assert complaint in wrong[0]


def test_rooms_of_one_floor_do_not_import_each_other_both_ways() -> None:
    one_way = Import("modules.a", "optim.b", 1)
    assert upward([one_way]) == []
    assert len(upward([one_way, Import("optim.b", "modules", 2)])) == 1


def test_imports_downward_are_allowed() -> None:
    code = "import torch\nfrom meshrec import ops\nfrom .lookup import Lookup\nfrom ..sparse import keyed"
    found = imports_of(ast.parse(code), "distributed.output_dist", is_package=False)
    assert [each.imported for each in found] == ["ops", "distributed.lookup", "sparse"]
    assert upward(found) == []


def test_inheritance_is_shallow() -> None:
    # TorchRec's configs have one field more than ours, and can be set.
    bridge = {"_BagFields", "_Fields"}
    assert [line for line in too_deep(package_trees()) if line.split(":")[0] not in bridge] == []


def test_deep_inheritance_is_seen() -> None:
    chain = "class A(Module): ...\nclass B(A): ...\nclass C(B): ..."
    assert too_deep({"sparse.x": ast.parse(chain)}) == ["C: 3 levels"]
    other = {"sparse.y": ast.parse("from meshrec.sparse.x import B\nclass C(B): ...")}
    assert too_deep({"sparse.x": ast.parse(chain[:41]), **other}) == ["C: 3 levels"]


def storage_classes() -> set[str]:
    """The classes of tables, storages and rows in flight, without those that users write in configs."""
    configs = {"FileRows", "Hashed", "HashedKeys"}
    shared = {"ArrivingRows", "ExternalRows", "LazyRows", "LocalShard"}
    folders = ("tables.dense", "tables.cached", "tables.hashed")
    return (
        shared
        | {
            node.name
            for module, tree in package_trees().items()
            for node in nodes_of(tree)
            if isinstance(node, ast.ClassDef) and module.startswith(folders)
        }
    ) - configs


def storage_checks(tree: ast.Module, classes: set[str]) -> list[int]:
    """The lines with an ``isinstance`` on one of the classes."""
    return [
        node.lineno
        for node in nodes_of(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and classes & {ast.unparse(name).split(".")[-1] for name in ast.walk(node.args[1])}
    ]


def test_only_tables_ask_for_the_class_of_a_storage() -> None:
    classes = storage_classes()
    found = {
        module: lines
        for module, tree in package_trees().items()
        if not module.startswith("tables.") and (lines := storage_checks(tree, classes))
    }
    assert found == {}


def test_checks_of_a_storage_are_seen() -> None:
    code = "isinstance(x, HashedRows)\nisinstance(x, (int, tables.FixedTable))\nisinstance(x, TableModule)"
    assert storage_checks(ast.parse(code), storage_classes()) == [1, 2]


def test_functions_can_be_read_on_one_screen() -> None:
    assert long_functions(package_trees()) - LONGER_FUNCTIONS == set()


def test_long_functions_are_seen() -> None:
    documented = "def f():\n    '''" + "\n" * 80 + "    '''\n"
    assert long_functions({"x": ast.parse(documented + "    pass\n" * MAX_FUNCTION_LINES)}) == {"x.f"}
    assert long_functions({"x": ast.parse(documented + "    pass\n" * (MAX_FUNCTION_LINES - 1))}) == set()


def test_every_source_folder_has_its_tests() -> None:
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    assert [
        str(folder) for folder in sorted(folders) if not list((ROOT / "tests" / folder).glob("test_*.py"))
    ] == []


def test_every_cpp_source_is_covered() -> None:
    assert sorted(CPP_TESTS) == sorted(path.name for path in (ROOT / "csrc").rglob("*.cpp"))
    assert [test for tests in CPP_TESTS.values() for test in tests if not (ROOT / test).exists()] == []


def test_registered_ops_are_those_of_schemas_inc() -> None:
    listed = {torch._C.parse_schema(f"meshrec::{schema}") for schema in library.schemas()}
    registered = {schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("meshrec::")}
    assert listed
    assert sorted(map(str, listed)) == sorted(map(str, registered))


@pytest.mark.parametrize("key", ["CPU", "Meta"])
def test_every_op_has_a_kernel(key: str) -> None:
    # An operator is registered when its reference is imported, on first use.
    for path in (ROOT / "src" / "meshrec" / "ops").glob("*/naive.py"):
        importlib.import_module(f"meshrec.ops.{path.parent.name}.naive")
    names = [f"meshrec::{schema.split('(')[0]}" for schema in library.schemas()]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in names if not has_kernel(name, key)] == []


def test_public_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    # The import of a bridge puts a finder there; other tests ask whether the bridged package is installed.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    rooms = [module_name(path, SOURCE.parent) for path in sorted(SOURCE.rglob("__init__.py"))]
    public = {room: getattr(importlib.import_module(room), "__all__", []) for room in rooms}
    missing = [
        (room, name) for room in rooms for name in public[room] if not hasattr(sys.modules[room], name)
    ]
    assert missing == []
    assert public["meshrec"]


def test_imports_are_light_and_silent() -> None:
    """The package needs torch alone; a server starts without what trains, a training without other models."""
    code = (
        "import json, sys, torch; before = set(sys.modules);"
        "import meshrec; package = set(sys.modules) - before;"
        "import meshrec.serve.server; server = set(sys.modules) - before;"
        "import meshrec.cli.train, meshrec.runs.worker; training = set(sys.modules) - before;"
        "json.dump([sorted(package), sorted(server), sorted(training)], sys.stderr)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    package, server, training = json.loads(done.stderr)  # anything else printed would not parse
    assert "meshrec" in package
    allowed = {"meshrec", "torch", *sys.stdlib_module_names}
    assert [name for name in package if name.split(".")[0] not in allowed] == []
    heavy = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed", "torch.export")
    assert [name for name in package if name.startswith(heavy)] == []
    trains = (
        "meshrec.distributed",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "triton",
        "sympy",
    )
    assert [name for name in server if name.startswith(trains)] == []
    seldom = (
        *("meshrec.models.din", "meshrec.models.multi_task", "meshrec.models.two_tower"),
        *("meshrec.data.movielens_data", "meshrec.data.criteo_data", "meshrec.data.stores"),
        *("meshrec.distributed.node_rows", "meshrec.distributed.reshard", "meshrec.train.recipes"),
    )
    assert [name for name in training if name.startswith(seldom)] == []
