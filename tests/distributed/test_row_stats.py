import pytest
import torch

from meshrec.comms.mesh import Axis
from meshrec.distributed.routing import Lookup, RankWork, Route, RoutedTable, Routing, Use
from meshrec.distributed.row_stats import ColumnPeers, TouchedRows
from meshrec.ops.tbe.formulas import Hyper
from meshrec.ops.tbe.naive_update import update_rows
from meshrec.optim import LAMB, LARS, PartialRowWiseLAMB, RowWiseAdagrad, RowWiseRMSpropAR
from meshrec.tables.table import Rectangle


def routing(*rectangles):
    empty = RankWork((), (), ())
    work = RankWork(tuple(rectangles), (Route(0, 0, 4),), (Lookup(0, 0, 0, 0, 2),))
    table = RoutedTable("t0", 4, 4, ("a",))
    return Routing(tables=(table,), uses=(Use(0, "a"),), work=(work,), local=empty, replicated=(False,))


HALVES = Rectangle(0, 0, 4, 0, 2), Rectangle(0, 0, 4, 2, 4)


@pytest.mark.parametrize(
    "spec",
    [
        RowWiseAdagrad(lr=0.1, weight_decay=0.1),
        LAMB(lr=0.1, weight_decay=0.1),
        PartialRowWiseLAMB(lr=0.1),
        LARS(lr=0.1, weight_decay=0.1),
        RowWiseRMSpropAR(lr=0.1, ar_alpha=3.0, weight_decay=0.1),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_an_update_of_column_parts_is_that_of_whole_rows(spec):
    """Both halves on one rank: the sums are those of the whole, and so is the update."""
    torch.manual_seed(0)
    weight, grad, rows = torch.rand(4, 4), torch.rand(3, 4), torch.tensor([0, 1, 3])
    state = [torch.rand(slot.shape(4, 4)) for slot in spec.state_slots()]
    hyper = Hyper.from_tensor(spec.hyper(lr=spec.lr, step=2, row_dim=4))
    parts = [(slice(0, 2), []), (slice(2, 4), [])]
    touched = []
    for columns, slots in parts:
        slots += [slot.clone() if slot.dim() == 1 else slot[:, columns].clone() for slot in state]
        part = weight[:, columns].clone()
        touched.append(TouchedRows(rows, grad[:, columns], part[rows], [slot[rows] for slot in slots]))
    peers = ColumnPeers(routing(*HALVES), Axis(), [0])
    stats = peers.row_stats(touched, spec.code, [hyper, hyper])
    whole = weight.clone()
    update_rows(whole, state, rows, grad, None, spec.code, hyper)
    for (columns, slots), sums in zip(parts, stats, strict=True):
        part = weight[:, columns].clone()
        update_rows(part, slots, rows, grad[:, columns], sums, spec.code, hyper)
        torch.testing.assert_close(part, whole[:, columns])


def test_means_are_taken_over_the_columns_of_all_rectangles():
    peers = ColumnPeers(routing(*HALVES), Axis(), [0])
    means = peers.mean_squares(torch.tensor([1.0, 2.0, 4.0, 3.0, 6.0, 8.0]), [3, 3], [4, 4])
    assert means.tolist() == [1.0, 2.0, 3.0] * 2
    assert ColumnPeers(routing(), Axis(), [0]).mean_squares(torch.empty(0), [], []).shape == (0,)
