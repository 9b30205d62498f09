"""Detect a closed output pipe, as after ``meshrec runs | head``."""

import select


def has_no_reader() -> bool:
    """Return whether the process reading this process's output has ended, like ``head`` after ten lines."""
    poll = select.poll()
    # Descriptor 1 is the standard output. poll reports errors even if no events are requested.
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def raise_if_unread(error: str) -> None:
    """Raise BrokenPipeError if the output pipe is closed, and this is the reason for a rank's error."""
    # rich raises SystemExit for a broken pipe. If only the last output cannot be written, the rank ends
    # without an error.
    signs = ("BrokenPipeError", "SystemExit", "a rank ended without an error")
    if has_no_reader() and any(sign in error for sign in signs):
        raise BrokenPipeError
