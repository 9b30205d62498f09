"""The checks of test_triton.py, as a program that runs where Triton interprets its kernels."""

import itertools
import os

import pytest
import torch
from test_naive import NUM_RANKS, Case, sequence_arguments

from meshrec.distributed.pieces import as_tensor, local_spans, pieces_of, rank_spans
from meshrec.ops.dist import naive, triton


def check_routes(case, wide):
    """Route, and unpack the message of every rank."""
    expected = case.route(naive.route_ids, wide)
    payload, *found = case.route(triton.route_ids, wide)
    words = payload[: int(found[0][:, 1].sum())]
    begin = 0
    for one, other in zip((words, *found), expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    for rank, work in enumerate([*case.routing.work, case.routing.local]):
        message = words[begin : begin + int(found[0][rank, 1])]
        begin += message.numel()
        header = found[0][[rank, rank]]
        arguments = (
            torch.cat([message, message + 0]),
            header,
            [1, 0],
            len(work.routes),
            case.weights is not None,
            wide,
        )
        for one, other in zip(triton.unpack_ids(*arguments), naive.unpack_ids(*arguments), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def check_pooled(case, dtype):
    routing = case.routing
    spans = [rank_spans(routing, rank) for rank in range(NUM_RANKS)]
    pieces = as_tensor(
        pieces_of([*spans, [span._replace(source=NUM_RANKS) for span in local_spans(routing)]])
    )
    dims, width = [work.dim for work in routing.work], routing.columns[-1]
    received, local = torch.rand(4 * sum(dims)).to(dtype), torch.rand(4, routing.local.dim)
    arguments = received, local, pieces, dims, 4, width, *case.bags()
    torch.testing.assert_close(triton.gather_pooled(*arguments), naive.gather_pooled(*arguments))
    arguments = torch.rand(4, width), pieces, dims, routing.local.dim, *case.bags(), 0.5, dtype
    for one, other in zip(triton.scatter_pooled(*arguments), naive.scatter_pooled(*arguments), strict=True):
        torch.testing.assert_close(one, other)


def check_sequences(case):
    arguments, size = sequence_arguments(case, case.route(naive.route_ids)[2])
    received = torch.rand(size)
    rows = triton.gather_sequence(received, *arguments)
    assert torch.equal(rows, naive.gather_sequence(received, *arguments))
    assert torch.equal(triton.scatter_sequence(rows, *arguments, 1.0, torch.float32), received)
    half = rows, *arguments, 0.5, torch.float16  # the interpreter cuts bf16 off
    assert torch.equal(triton.scatter_sequence(*half), naive.scatter_sequence(*half))
    for op in (triton.gather_sequence, naive.gather_sequence):
        with pytest.raises(ValueError, match="received 3"):
            op(torch.rand(3), *arguments)


def check_weight_grads(case):
    counts = case.route(naive.route_ids)[2]
    arguments = torch.rand(int(counts.sum())), case.values, *case.bags(), case.routing.router, counts
    torch.testing.assert_close(triton.gather_weight_grads(*arguments), naive.gather_weight_grads(*arguments))


def check_bad_input():
    """What is wrong stands in the status of every header, and in the counts."""
    case = Case(False, torch.int64, True)
    case.values[int(case.offsets[5])] = 12
    _, header, _, bad = case.route(triton.route_ids)
    assert (header[:, 0] == 1).all()
    assert bad.tolist() == [0, 1, 1, 0, 0]
    _, header, _, bad = case.route(triton.route_ids, check_ids=False)
    assert (header[:, 0] == 0).all()
    assert bad.tolist() == [0, 1, 1, 0, 0]
    case.values.fill_(1)
    assert (case.route(triton.route_ids)[1][:, 0] == 0).all()
    case.weights[0] = torch.nan
    assert (case.route(triton.route_ids)[1][:, 0] == 1).all()
    for place, change in ((-1, 1), (0, 1), (5, 40), (5, -4)):
        case = Case(False, torch.int64, True)
        case.offsets[place] += change
        # Nothing is written outside the payload, whatever the offsets say.
        _, header, *_ = case.route(triton.route_ids, check_ids=False)
        assert (header[:, 0] == 1).all()


def check_every_op():
    for seed, (ragged, dtype, weighted, wide) in enumerate(
        itertools.product((False, True), (torch.int32, torch.int64), (False, True), (False, True))
    ):
        # Every three of the four options meet in half of the cases.
        if (ragged + (dtype == torch.int64) + weighted + wide) % 2 and "MESHREC_THOROUGH" not in os.environ:
            continue
        case = Case(ragged, dtype, weighted, seed)
        check_routes(case, wide)
        if not ragged and wide:
            for pooled in (torch.float32, torch.float16, torch.bfloat16):
                check_pooled(case, pooled)
        if not weighted and not wide:
            check_sequences(case)
            check_weight_grads(case)
    nothing = Case(False, torch.int64, True)
    nothing.values, nothing.weights = nothing.values[:0], nothing.weights[:0]
    nothing.offsets = torch.zeros_like(nothing.offsets)
    check_routes(nothing, False)
    check_sequences(nothing)
    check_weight_grads(nothing)
    check_bad_input()
