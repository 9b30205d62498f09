import pytest
import torch

from meshrec.sparse.validation import check_bags, count_bags

NAN = float("nan")


@pytest.mark.parametrize(
    ("lengths", "offsets", "weights", "message"),
    [
        ([1, -2, 4], None, None, "^bag 1: the length is -2; lengths are 0 or more"),
        (
            [1, 1, 2, 0],
            None,
            None,
            "^bag 2: its ids are 2 to 4, but there are 3 values; the lengths sum to 4",
        ),
        ([1, 1], None, None, "^the lengths sum to 2, but there are 3 values: the last 1 belong to no sample"),
        ([], None, None, "^the lengths sum to 0, but there are 3 values"),
        (None, [0, 2, 1, 3], None, "^bag 1: the offsets fall from 2 to 1; they may only rise"),
        (None, [1, 2, 3], None, "^the offsets start at 1; the first must be 0"),
        (None, [0, 1, 5], None, "^bag 1: the offsets reach 5, but there are 3 values"),
        (
            None,
            [0, 1, 2],
            None,
            "^the offsets end at 2, but there are 3 values: the last 1 belong to no sample",
        ),
        ([1, 2], [0, 2, 3], None, "^bag 0: the length is 1, but the offsets 0 to 2 hold 2 ids"),
        ([0, 1, 0, 2], None, [0.0, 1.0, NAN], "^bag 3: weight 1 is NaN"),
        (None, [0, 0, 1, 3], [0.0, NAN, NAN], "^bag 2: weight 0 is NaN"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_wrong_and_where(lengths, offsets, weights, message, dtype):
    with pytest.raises(ValueError, match=message):
        check_bags(
            torch.arange(3),
            None if weights is None else torch.tensor(weights),
            None if lengths is None else torch.tensor(lengths, dtype=dtype),
            None if offsets is None else torch.tensor(offsets, dtype=dtype),
            "bag {}".format,
        )


def test_good_bags_pass():
    values, lengths, offsets = torch.arange(3), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1, 3])
    check_bags(values, torch.ones(3), lengths, offsets, str)
    check_bags(values, torch.ones(3, 2), lengths, None, str)
    check_bags(values, torch.ones(3, dtype=torch.int64), None, offsets, str)
    check_bags(values[:0], None, lengths[:0], offsets[:1], str)


def test_nan_in_a_row_of_weights():
    with pytest.raises(ValueError, match=r"1.*weight 0.*NaN"):
        check_bags(torch.arange(2), torch.tensor([[1.0, 1.0], [1.0, NAN]]), torch.tensor([1, 1]), None, str)


def test_bags_are_counted_by_lengths_or_offsets():
    assert count_bags(torch.tensor([1, 2]), None) == 2
    assert count_bags(None, torch.tensor([0, 1, 3])) == 2
