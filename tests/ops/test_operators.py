"""Errors of operators, as they are up to torch 2.14 and from 2.15 on."""

import re
from pathlib import Path

import pytest
import torch

from meshrec.ops import library, operators
from meshrec.ops.operators import InputError, OutOfMemoryError, translate_error

SOURCE = Path(library.__file__).parents[1]
# TorchScript and rewrites of graphs name the operators themselves; one operator calls others.
NAMED_DIRECTLY = {
    "compat/bridge/quant_lookups.py",
    "export/onnx.py",
    "export/sharing.py",
    "ops/dist/naive.py",
    "ops/operators.py",
}


def raising(error):
    def operator(*_):
        raise error

    return operators.with_translated_errors(operator)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_invalid_input_has_one_type_and_no_mark(kind):
    with pytest.raises(InputError, match=r"^id 7 is outside$") as failure:
        raising(kind("invalid input: id 7 is outside"))(1, 2)
    assert isinstance(failure.value, ValueError)


def test_the_plain_torch_versions_raise_the_same_type():
    with pytest.raises(InputError, match=r"^id 7 is outside$"):
        raising(ValueError("id 7 is outside"))()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("not enough memory: could not allocate 8 bytes"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_missing_memory_has_one_type(error):
    with pytest.raises(OutOfMemoryError, match=re.escape(str(error))) as failure:
        raising(error)()
    assert isinstance(failure.value, MemoryError)
    assert isinstance(failure.value, RuntimeError)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), NotImplementedError("no kernel"), KeyError("x")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as failure:
        raising(error)()
    assert failure.value is error


def test_an_error_that_was_translated_stays_as_it_is():
    error = InputError("id 7")
    assert translate_error(error) is error


@pytest.mark.skipif(not library.has_kernels, reason="no compiled kernels")
def test_kernels_mark_invalid_input():
    with pytest.raises((ValueError, RuntimeError), match=f"^{operators.INVALID}the values must be int32"):
        torch.ops.meshrec.marked_range(torch.zeros(3), None)
    with pytest.raises(InputError, match=r"^the values must be int32"):
        operators.marked_range(torch.zeros(3), None)


def test_an_unknown_operator_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_operator"):
        operators.no_such_operator(1)


def test_operators_can_be_traced_without_a_break():
    lengths = torch.tensor([2, 0, 1])
    compiled = torch.compile(lambda x: operators.lengths_to_offsets(x) + 1, fullgraph=True, backend="eager")
    assert compiled(lengths).tolist() == [1, 3, 3, 4]


def test_the_package_calls_operators_through_the_boundary_only():
    direct = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"(?<!`)torch\.ops\.meshrec\b", path.read_text())
    }
    assert direct <= NAMED_DIRECTLY | {"sparse/keyed_jagged_tensor.py", "compat/bridge/missing.py"}
