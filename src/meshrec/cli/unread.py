"""Detection of a closed output pipe, as after ``meshrec runs | head``."""

import select


def has_no_reader() -> bool:
    """Return whether the reader of this process's output has ended, as ``head`` does after ten lines."""
    poll = select.poll()
    poll.register(1, 0)  # errors are reported without being asked for
    return any(events & select.POLLERR for _, events in poll.poll(0))


def raise_if_unread(error: str) -> None:
    """Raise BrokenPipeError if the output pipe is closed, and a rank's error is a consequence of that.

    Args:
        error: the error of the rank that failed first. rich raises SystemExit for a broken pipe. A rank whose
            last output cannot be written ends without an error.
    """
    signs = ("BrokenPipeError", "SystemExit", "a rank ended without an error")
    if has_no_reader() and any(sign in error for sign in signs):
        raise BrokenPipeError
