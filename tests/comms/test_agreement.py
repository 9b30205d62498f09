import pytest

from meshrec.comms.agreement import raise_as_one, together
from meshrec.comms.failures import combined_error, sendable
from meshrec.comms.mesh import Axis, default_env
from meshrec.ops.operators import InputError, OutOfMemoryError


class TwoPartError(Exception):
    """Unlike most, it does not survive pickling."""

    def __init__(self, path, line):
        super().__init__(f"{path}, line {line}")


def fail_on(failing, kind, *arguments):
    axis = default_env().world
    try:
        with together(axis, "trying"):
            if axis.rank in failing:
                raise kind(*arguments)
    except Exception as caught:
        return type(caught), str(caught)


@pytest.mark.parametrize(
    ("failing", "kind", "arguments", "expected"),
    [
        ([1], InputError, ("no",), (InputError, "rank 1: no")),
        ([0], OutOfMemoryError, ("no",), (OutOfMemoryError, "rank 0: no")),
        ([1], MemoryError, (), (MemoryError, "rank 1: MemoryError")),
        ([1], UnicodeError, ("no",), (ValueError, "rank 1: no")),
        ([1], TwoPartError, ("a.csv", 3), (RuntimeError, "rank 1: TwoPartError: a.csv, line 3")),
        ([0, 1], KeyError, ("x",), (RuntimeError, "KeyError: 'x'")),
        ([], ValueError, (), None),
    ],
)
def test_any_error_of_some_ranks_is_raised_on_all(ranks, failing, kind, arguments, expected):
    assert ranks(2).run(fail_on, failing, kind, *arguments) == [expected] * 2


def test_a_single_process_raises_the_error_itself():
    error = TwoPartError("a.csv", 3)
    with pytest.raises(TwoPartError) as failure:
        raise_as_one(error, Axis(), "trying")
    assert failure.value is error


def test_errors_of_several_kinds_are_a_runtime_error():
    error = combined_error({0: ValueError("a"), 2: sendable(OSError("b"))}, size=4)
    assert type(error) is RuntimeError
    assert str(error) == "rank 0: a\nrank 2: OSError: b"
