"""The sparse types as pytrees, in compiled programs and in exported ones."""

import io
import logging

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def uniform(num_bags: int = 3) -> KeyedJaggedTensor:
    lengths = torch.arange(2 * num_bags) % 3
    values = torch.arange(int(lengths.sum()))
    return KeyedJaggedTensor(["a", "b"], values, values / 2, lengths)


def variable(num_bags: int = 3) -> KeyedJaggedTensor:
    lengths = torch.arange(2 * num_bags + 1) % 3
    values = torch.arange(int(lengths.sum()))
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride_per_key=[num_bags, num_bags + 1])


def by_offsets(num_bags: int = 3) -> KeyedJaggedTensor:
    tensor = uniform(num_bags)
    return KeyedJaggedTensor(tensor.keys(), tensor.values(), tensor.weights(), offsets=tensor.offsets())


def inverse() -> KeyedJaggedTensor:
    indices = (["b", "a"], torch.tensor([[0, 1], [1, 0]]))
    tensor = variable()
    return KeyedJaggedTensor(
        tensor.keys(), tensor.values(), None, tensor.lengths(), stride_per_key=[3, 4], inverse_indices=indices
    )


def keyed(scale: float = 1.0) -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3) * scale)


def jagged() -> JaggedTensor:
    return JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))


EXAMPLES = [jagged, uniform, variable, by_offsets, inverse, KeyedJaggedTensor.empty, keyed]


@pytest.mark.parametrize("make", EXAMPLES)
def test_flatten_and_back(make):
    tensor = make()
    leaves, spec = pytree.tree_flatten(tensor)
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(tensor)
    assert str(again) == str(tensor)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert hash(spec) == hash(pytree.tree_flatten(make())[1])
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tensor)[0]]
    assert paths[0] == ".values"
    assert len(paths) == len(leaves)


def test_what_the_context_keeps():
    empty = KeyedJaggedTensor.empty_like(uniform())
    assert pytree.tree_map(lambda leaf: leaf, empty).stride() == 3
    tensor = pytree.tree_map(lambda leaf: leaf, inverse())
    assert tensor.stride_per_key() == [3, 4]
    assert tensor.inverse_indices()[0] == ["b", "a"]


@pytest.mark.parametrize("make", [uniform, by_offsets, variable, jagged])
def test_leaves_do_not_depend_on_what_was_computed(make):
    """Otherwise an exported program would refuse an input that somebody has looked at."""
    looked_at = make()
    looked_at.offsets()
    looked_at.lengths()
    str(looked_at)
    if isinstance(looked_at, KeyedJaggedTensor):
        looked_at.sync().to_dict()
    for tensor in (looked_at, looked_at.to(torch.device("cpu"))):
        present = [leaf is None for leaf in pytree.tree_flatten(tensor)[0]]
        assert present == [leaf is None for leaf in pytree.tree_flatten(make())[0]]


def test_leaves_may_be_anything():
    assert pytree.tree_map(lambda leaf: "x", uniform()).values() == "x"


def sizes_known(tensor: KeyedJaggedTensor):
    """What needs no size from the data."""
    swapped = tensor.permute([1, 0])
    both = KeyedJaggedTensor.concat([tensor, swapped])
    fresh = KeyedJaggedTensor(["c"], tensor.values() + 1, lengths=tensor.lengths())
    whole = tensor.split([2])[0]
    return tensor, swapped, both, both.offsets(), fresh, whole


def sizes_from_data(tensor: KeyedJaggedTensor):
    """What needs the number of values of each key."""
    first, second = tensor.split([1, 1])
    return tensor["b"], first, second, tensor.to_dict(), tensor.permute([1, 1]), first.offsets()


def dense(tensor: KeyedTensor):
    groups = KeyedTensor.regroup([tensor, KeyedTensor(["c"], [3], tensor.values() * 2)], [["b", "c"], ["a"]])
    named = KeyedTensor.regroup_as_dict([tensor], [["b", "a"]], ["x"])
    return tensor, groups, named, tensor["b"] + 1, tensor.to_dict()


def sequence(tensor: JaggedTensor):
    changed = JaggedTensor(tensor.values() + 1, offsets=tensor.offsets())
    return tensor, changed, changed.lengths(), changed.to_padded_dense(2)


PROGRAMS = [
    (sizes_known, uniform),
    (sizes_known, variable),
    (sizes_known, by_offsets),
    (sizes_from_data, uniform),
    (sizes_from_data, variable),
    (dense, keyed),
    (sequence, jagged),
]


@pytest.mark.parametrize(("program", "make"), PROGRAMS)
def test_compiled_without_a_graph_break(program, make):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=program is sizes_from_data):
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        assert str(compiled(make())) == str(program(make()))
        looked_at = make()
        str(looked_at)
        assert str(compiled(looked_at)) == str(program(make()))


@pytest.mark.parametrize("make", [uniform, variable])
def test_counts_known_on_the_host_compile_in_the_default_mode(make):
    torch._dynamo.reset()
    compiled = torch.compile(sizes_from_data, fullgraph=True, backend="aot_eager")
    assert str(compiled(make().sync())) == str(sizes_from_data(make()))


def test_other_batch_sizes_are_compiled_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda t: (t.permute([1, 0]), t.stride()), fullgraph=True, backend=counter)
    for num_bags in (3, 4, 5, 6, 7):
        assert str(compiled(uniform(num_bags))) == str((uniform(num_bags).permute([1, 0]), num_bags))
    assert counter.frame_count == 2


def test_compiled_gradients():
    torch._dynamo.reset()

    def program(weights, values):
        tensor = uniform()
        kjt = KeyedJaggedTensor(tensor.keys(), tensor.values(), weights, tensor.lengths()).permute([1, 0])
        groups = KeyedTensor.regroup([KeyedTensor(["a", "b"], [1, 2], values)], [["b", "a"]])
        return (kjt.weights() * torch.arange(6)).sum() + (groups[0] * torch.arange(3)).sum()

    inputs = torch.rand(6, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    expected, actual = (torch.autograd.grad(f(*inputs), inputs) for f in (program, compiled))
    torch.testing.assert_close(actual, expected)


class Program(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, tensor):
        return self.program(tensor)


def saved_and_loaded(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    logging.getLogger("torch._export.serde.serialize").setLevel(logging.ERROR)  # it counts unused symbols
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("program", "make"), PROGRAMS)
def test_exported_saved_and_loaded(program, make, strict):
    torch._dynamo.reset()
    exported = torch.export.export(Program(program), (make(),), strict=strict)
    loaded = saved_and_loaded(exported).module()
    looked_at = make()
    str(looked_at)
    assert str(loaded(looked_at)) == str(program(make()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", [sizes_known, sizes_from_data])
@pytest.mark.parametrize("make", [uniform, variable])
def test_exported_for_any_batch_size(program, make, strict):
    """The example's counts are known on the host; they must not become constants of the program."""
    torch._dynamo.reset()
    n = {0: Dim.DYNAMIC}
    weights = n if make is uniform else None
    exported = torch.export.export(
        Program(program),
        (make().sync(),),
        strict=strict,
        dynamic_shapes={"tensor": [n, weights, n, None, None, None]},
    )
    loaded = exported.module()
    for num_bags in (3, 5):
        assert str(loaded(make(num_bags))) == str(program(make(num_bags)))
