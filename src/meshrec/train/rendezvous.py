"""Rendezvous backend for torch's elastic launcher on a single machine, which opens no port.

torch's own c10d rendezvous opens a store on every network interface, and unpickles any data sent to it.
Without a port, nobody else can reach the launcher.
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
    """Rendezvous with a single participant (this launcher) and an in-memory store.

    Ranks use a separate store; see [Note: who can reach the ranks of a run] in comms/joining.py.

    Args:
        run_id: ID given to the launcher.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, because this process is the only participant."""
        # The launcher passes this address on to the ranks, which do not use it.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False, because ranks may be restarted at any time."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because no other participant could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Return True; there is nothing to close."""
        return True


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous. torch's registry calls this function."""
    return SingleMachineRendezvous(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make_handler)
