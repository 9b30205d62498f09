import pytest
import torch

from meshrec.ops.tbe.layout import MEAN, NONE, SUM, check_offsets, make_layout, segment_bounds


def test_pieces_of_two_blocks_with_an_unread_key():
    # Block 0 has two bags per key, block 1 has one; key 1 is read by nobody.
    offsets = torch.tensor([0, 1, 3, 4, 4, 6, 9, 9, 10, 12])
    segments = torch.tensor([0, 2, 4, 6, 7, 8, 9])
    layout = make_layout(offsets, segments, 3, [0, 2], [4, 2], pooling=[SUM, MEAN], flat=False)
    assert layout.out_size == 3
    seen = [(p.feature, p.ids, p.lengths_B.tolist(), p.rows, p.columns) for p in layout.pieces]
    assert seen == [
        (0, slice(0, 3), [1, 2], slice(0, 2), slice(0, 4)),
        (1, slice(4, 9), [2, 3], slice(0, 2), slice(4, 6)),
        (0, slice(9, 9), [0], slice(2, 3), slice(0, 4)),
        (1, slice(10, 12), [2], slice(2, 3), slice(4, 6)),
    ]
    assert layout.pieces[1].bag_of_id().tolist() == [0, 0, 1, 1, 1]


def test_flat_pieces_follow_one_another():
    offsets, segments = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2, 3])
    pooled = make_layout(offsets, segments, 2, [0, 1], [4, 2], pooling=[SUM, SUM], flat=True)
    assert [p.flat for p in pooled.pieces] == [slice(0, 8), slice(8, 10)]
    per_id = make_layout(offsets, segments, 2, [0, 1], [4, 2], pooling=[NONE, NONE], flat=True)
    assert [p.flat for p in per_id.pieces] == [slice(0, 12), slice(12, 14)]
    assert (pooled.out_size, per_id.out_size) == (10, 14)
    assert per_id.pieces[1].view_of(torch.arange(14), 2).tolist() == [[12, 13]]


def test_without_segments_bags_are_shared_evenly():
    assert segment_bounds(6, None, 3) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3], "offsets.*1.*0"),
        ([0, 3, 2, 3], "3.*2.*bag 1"),
        ([0, 1, 2], "2.*3 values"),
        ([], "offsets"),
    ],
)
def test_bad_offsets(offsets, message):
    with pytest.raises(ValueError, match=message):
        check_offsets(torch.tensor(offsets, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4], "1 entries"),
        ([0, 2, 1, 2, 4], "rise.*0.*4"),
        ([1, 2, 4], "rise.*0"),
        ([0, 2, 3], "rise.*0"),
    ],
)
def test_bad_segments(bounds, message):
    with pytest.raises(ValueError, match=message):
        segment_bounds(4, torch.tensor(bounds), 2)


def test_uneven_bags():
    with pytest.raises(ValueError, match=r"5 bags.*among 2"):
        segment_bounds(5, None, 2)


def test_batch_sizes_that_differ_need_a_flat_output():
    with pytest.raises(ValueError, match=r"feature 1.*1 samples.*key 2"):
        make_layout(
            torch.tensor([0, 1, 3, 4]),
            torch.tensor([0, 2, 3]),
            2,
            [0, 1],
            [4, 2],
            pooling=[SUM, SUM],
            flat=False,
        )


def test_sequence_lookups_need_a_flat_output():
    with pytest.raises(ValueError, match="lookups"):
        make_layout(torch.tensor([0, 1, 3]), None, 2, [0, 1], [4, 2], pooling=[SUM, NONE], flat=False)
