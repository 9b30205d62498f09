"""A process that starts children, first with a single thread, then beside another one."""

import os
import signal
import threading

from meshrec.serve.child import Child, receive, send

origin = "an interpreter"


def answer(parent):
    """Say whose memory this process has."""
    while True:
        send(parent, [receive(parent), origin])


def main():
    import parent  # another interpreter finds no function of `__main__`

    parent.origin = "a fork"
    child = Child(parent.answer)
    assert child.ask(1) == [1, "a fork"]
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    os.kill(child._pid, signal.SIGKILL)
    try:
        child.ask(2)
    except EOFError:
        child.start()
    assert child.ask(3) == [3, "an interpreter"]
    child.stop()
    late = Child(parent.answer)
    assert not late.is_running
    ends.set()
    other.join()
    late.start()
    assert late.ask(4) == [4, "a fork"]
    late.stop()


if __name__ == "__main__":
    main()
