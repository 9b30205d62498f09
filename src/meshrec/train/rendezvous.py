"""Rendezvous backend of torch's elastic launcher for one machine. It opens no port, so nobody else can join.

torch's c10d rendezvous hosts a store on every network interface, and unpickles any data sent to it.
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
"""Backend name in the launcher's configuration."""


class SingleMachineRendezvous(RendezvousHandler):
    """A rendezvous with one participant and an in-memory store.

    Ranks use a separate store, see [Note: who can reach the ranks of a run] in comms/joining.py.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, because this process is the only participant."""
        # The launcher gives the ranks this address, but they do not use it.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False, because ranks may be restarted at any time."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Return True; there is nothing to close."""
        return True


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the handler; called by torch's registry."""
    return SingleMachineRendezvous(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make_handler)
