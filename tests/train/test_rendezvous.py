from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from meshrec.train.rendezvous import BACKEND


def test_the_launcher_meets_itself_at_once():
    parameters = RendezvousParameters(BACKEND, endpoint="", run_id="x", min_nodes=1, max_nodes=1)
    handler = rendezvous_handler_registry.create_handler(parameters)
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1)
    assert (handler.get_backend(), handler.get_run_id()) == (BACKEND, "x")
    assert not handler.use_agent_store  # ranks have a store of their own
    assert (handler.is_closed(), handler.num_nodes_waiting(), handler.shutdown()) == (False, 0, True)
    handler.set_closed()
    assert not handler.is_closed()
