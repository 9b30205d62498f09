"""The rendezvous of torch's elastic launcher on one machine: nobody else can come, and nothing listens.

torch's own c10d rendezvous hosts a store on every interface, and unpickles what anybody writes there.
"""

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "meshrec_one_machine"
"""The name of this rendezvous in the launcher's configuration."""


class OneMachine(RendezvousHandler):
    """A rendezvous with one participant, whose store is in its own memory.

    The ranks have a store of their own, see [Note: who can reach the ranks of a run] in comms/joining.py.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once: the only participant is here."""
        # The launcher tells ranks of an address, which they do not use.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False: ranks may be started anew at any time."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: nothing is open."""
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachine(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make)
