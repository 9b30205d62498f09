"""What the compiled lookups refuse, in the words of naive.py; a refused update has changed nothing."""

import pytest
import torch

from meshrec.ops import library, operators
from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import FORMULAS, HYPER_SIZE, OptimizerKind
from meshrec.ops.tbe.layout import NONE

OPS = operators
NAN = float("nan")

needs_kernels = pytest.mark.skipif(not library.has_kernels, reason="naive.py does not check this")
both = pytest.mark.parametrize("ops", [OPS, naive], ids=["kernels", "naive"])


def put(tensor, at, value):
    """A copy of ``tensor`` with one number changed."""
    changed = tensor.clone()
    changed[at] = value
    return changed


def first_id(case, key, sample):
    """The position of the first id of a sample that has one, in the only block."""
    bag = key * ((case.offsets.numel() - 1) // case.num_keys) + sample
    assert case.offsets[bag + 1] > case.offsets[bag]
    return int(case.offsets[bag])


@pytest.fixture
def case(make_case):
    """12 samples per key; sample 7 has ids under every key."""
    drawn = make_case(num_bags=((12,) * 4,), weighted=True, seed=5)
    lengths = drawn.offsets.diff().view(4, 12)
    assert (lengths[:, 7] > 0).all()
    return drawn


# (key, sample) of an id, and the table, feature and number of rows that messages name; of the two features
# that read key 2 the first.
PLACES = [
    ((2, 7), 0, "a", 50),
    ((0, 7), 1, "b", 9),
    ((3, 7), 2, "d", 700),
]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, -(2**31), "the number of rows", 2**31 - 1])
@pytest.mark.parametrize(("place", "table", "feature", "num_rows"), PLACES)
@both
def test_ids_outside_the_table_are_named(case, ops, place, table, feature, num_rows, bad, id_dtype):
    bad = num_rows if bad == "the number of rows" else bad
    values = put(case.values.to(id_dtype), first_id(case, *place), bad)
    message = (
        rf"^table 't{table}': id {bad} of feature '{feature}' \(sample 7\) is outside \[0, {num_rows}\)\. "
        r"Raise num_embeddings, or hash the ids\.$"
    )
    with pytest.raises(ValueError, match=message):
        case._replace(values=values).forward(ops)


@pytest.mark.parametrize("bad", [-(2**63), 2**63 - 1, 2**32])
@both
def test_ids_of_64_bits_are_not_cut(case, ops, bad):
    values = put(case.values, first_id(case, 0, 7), bad)
    with pytest.raises(ValueError, match=rf"{bad}.*'b'.*sample 7.*\[0.*9"):
        case._replace(values=values).forward(ops)


@both
def test_ids_of_a_later_block_are_found(make_case, ops):
    case = make_case(num_bags=((2,) * 4, (9,) * 4))
    last = int(case.offsets[-1]) - 1
    sample = int(torch.searchsorted(case.offsets, last, right=True)) - 1 - 8 - 27
    with pytest.raises(ValueError, match=rf"'t2'.*id 700.*'d'.*{sample}.*\[0.*700"):
        case._replace(values=put(case.values, last, 700)).forward(ops)


@both
def test_nan_weights_are_named(case, ops):
    at = first_id(case, 3, 7)
    bad = case._replace(sample_weights=put(case.sample_weights, at, NAN))
    message = (
        rf"^table 't2': the weight of id {int(case.values[at])} of feature 'd' \(sample 7\) is NaN\. "
        r"Weights must be numbers; find where this one comes from\.$"
    )
    with pytest.raises(ValueError, match=message):
        bad.forward(ops)
    out = bad.forward(ops, check_ids=False)
    assert out[7].isnan().any()
    assert not out[:7].isnan().any()


@both
def test_ids_and_weights_of_a_key_that_nobody_reads_are_free(case, ops):
    at = first_id(case, 1, 7)
    odd = case._replace(values=put(case.values, at, -5), sample_weights=put(case.sample_weights, at, NAN))
    assert torch.equal(odd.forward(ops), case.forward(ops))


# As messages call the table and feature where no names are at hand.
BY_NUMBER = r"table '2': id 700 of feature '3' \(sample 7\) is outside \[0, 700\)"


@pytest.mark.parametrize("op", ["dense_grad", "sparse_grad", "sample_weight_grad"])
@both
def test_gradients_refuse_ids_outside_the_table(case, ops, op):
    bad = case._replace(values=put(case.values, first_id(case, 3, 7), 700))
    with pytest.raises(ValueError, match=BY_NUMBER):
        getattr(bad, op)(ops, case.gradient())


@both
def test_a_skipped_feature_may_hold_any_id(case, ops):
    bad = case._replace(values=put(case.values, first_id(case, 3, 7), 700), tables=[0, 1, 1, -1])
    assert [grad.shape for grad in bad.dense_grad(ops, case.gradient())] == [(50, 4), (9, 17), (700, 64)]


# How a batch may be wrong -> what is said. Every op that takes it says so, both implementations do.
WRONG_BATCHES = {
    "late start": (
        lambda c: c._replace(offsets=put(c.offsets, 0, 1)),
        "offsets start at 1, not at 0. Pass offsets made from the lengths",
    ),
    "falling": (
        lambda c: c._replace(offsets=put(c.offsets, 20, 10_000)),
        "offsets fall from 10000 to .* at bag 20. Offsets must never fall; call validate()",
    ),
    "negative": (
        lambda c: c._replace(offsets=put(c.offsets, 1, -1)),
        "offsets fall from 0 to -1 at bag 0",
    ),
    "too few values": (
        lambda c: c._replace(values=c.values[:-1], sample_weights=None),
        "the lengths sum to .* but there are .* values. Call validate()",
    ),
    "no offsets": (
        lambda c: c._replace(offsets=c.offsets[:0]),
        "values and offsets must have one dimension, and offsets at least one entry",
    ),
    "two dimensions": (
        lambda c: c._replace(offsets=c.offsets[None]),
        "values and offsets must have one dimension, and offsets at least one entry",
    ),
    "keys of unequal size": (
        lambda c: c._replace(num_keys=5),
        "48 bags do not divide among 5 keys. Pass the batch size of each key when they differ",
    ),
    "no keys": (lambda c: c._replace(num_keys=0), "48 bags do not divide among 0 keys"),
    "ragged segments": (
        lambda c: c._replace(segments=torch.tensor([0, 12, 24, 48])),
        r"segments must be an int64 CPU tensor with blocks \* keys \+ 1 entries",
    ),
    "no segments": (
        lambda c: c._replace(segments=torch.empty(0, dtype=torch.int64)),
        r"segments must be an int64 CPU tensor with blocks \* keys \+ 1 entries",
    ),
    "segments start late": (
        lambda c: c._replace(segments=torch.tensor([1, 12, 24, 36, 48])),
        r"segments must rise from 0 to the number of bags \(48\)",
    ),
    "segments end early": (
        lambda c: c._replace(segments=torch.tensor([0, 12, 24, 36, 47])),
        r"segments must rise from 0 to the number of bags \(48\)",
    ),
    "segments fall": (
        lambda c: c._replace(segments=torch.tensor([0, 24, 12, 36, 48])),
        r"segments must rise from 0 to the number of bags \(48\)",
    ),
    "2-D output of unequal keys": (
        lambda c: c._replace(segments=torch.tensor([0, 12, 24, 35, 48])),
        "feature 0 has 11 samples and the first key 12. One output matrix needs one batch size",
    ),
    "2-D sequences": (
        lambda c: c._replace(pooling=[0, 0, NONE, 0], sample_weights=None),
        "lookups that are not pooled have a flat output",
    ),
}
WRONG_WEIGHTS = {
    "too few": (
        lambda c: c._replace(sample_weights=c.sample_weights[:2]),
        "there are .* values but 2 per-sample weights. Each id needs one weight",
    ),
    "float64": (
        lambda c: c._replace(sample_weights=c.sample_weights.double()),
        r"per-sample weights must be float32. Convert them with \.float\(\)",
    ),
    "sequences": (
        lambda c: c._replace(pooling=[NONE] * 4, flat=True),
        "per-sample weights belong to pooled lookups; a sequence lookup takes none",
    ),
}


@pytest.mark.parametrize("name", [*WRONG_BATCHES, *WRONG_WEIGHTS])
@both
def test_forward_refuses_wrong_batches(case, ops, name):
    change, message = {**WRONG_BATCHES, **WRONG_WEIGHTS}[name]
    with pytest.raises(ValueError, match=message):
        change(case).forward(ops, out_size=12)


@pytest.mark.parametrize("op", ["dense_grad", "sparse_grad", "sample_weight_grad"])
@pytest.mark.parametrize("name", WRONG_BATCHES)
@both
def test_gradients_refuse_wrong_batches(case, ops, op, name):
    change, message = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        getattr(change(case), op)(ops, case.gradient())


@pytest.mark.parametrize("name", [n for n in WRONG_BATCHES if not n.startswith("2-D")])
@both
def test_clamp_ids_refuses_wrong_batches(case, ops, name):
    change, message = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        change(case).clamp_ids(ops)


@both
def test_out_size_must_fit(case, ops):
    with pytest.raises(ValueError, match=r"out_size.*11.*give 12"):
        case.forward(ops, out_size=11)
    with pytest.raises(ValueError, match=f"out_size.*12.*{12 * sum(case.dims)}"):
        case._replace(flat=True).forward(ops, out_size=12)


@both
def test_sequences_have_no_sample_weight_gradient(case, ops):
    sequence = case._replace(pooling=[NONE] * 4, flat=True, sample_weights=None)
    with pytest.raises(ValueError, match="sequence"):
        sequence.sample_weight_grad(ops, sequence.gradient())


@pytest.mark.parametrize("op", ["dense_grad", "sparse_grad", "sample_weight_grad"])
@both
def test_gradients_must_have_the_size_of_the_output(case, ops, op):
    with pytest.raises(ValueError, match=f"{11 * 102}.*{12 * 102}"):
        getattr(case, op)(ops, torch.ones(11, 102))


@both
def test_widths_start_at_1(case, ops):
    empty = case._replace(weights=[torch.empty(50, 0), *case.weights[1:]], dims=[0, *case.dims[1:]])
    with pytest.raises(ValueError, match=r"feature 0.*0 wide.*1"):
        empty.forward(ops, out_size=12)
    with pytest.raises(ValueError, match=r"feature 0.*0 wide.*1"):
        empty.sparse_grad(ops, torch.ones(12, sum(empty.dims)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c._replace(values=c.values.float()),
            "int32.*int64",
        ),
        (lambda c: c._replace(values=c.values.short()), "int32.*int64"),
        (
            lambda c: c._replace(offsets=c.offsets.float()),
            "int32.*int64",
        ),
        (lambda c: c._replace(values=c.values[:, None]), "dimension"),
        (
            lambda c: c._replace(segments=torch.tensor([0, 12, 24, 36, 48], dtype=torch.int32)),
            "int64.*CPU",
        ),
        (lambda c: c._replace(keys=[2, 0, 4, 3]), "feature 2.*key 4.*4"),
        (lambda c: c._replace(keys=[2, 0, -1, 3]), "feature 2.*key -1.*4"),
        (lambda c: c._replace(keys=[2, 0, 2]), "entry.*3.*4.*4.*4"),
        (lambda c: c._replace(pooling=[0]), "entry.*4.*4.*1.*4"),
    ],
)
@needs_kernels
def test_kernels_check_types_and_counts(case, change, message):
    with pytest.raises(ValueError, match=message):
        change(case).forward(OPS, out_size=12)
    with pytest.raises(ValueError, match=message):
        change(case).sparse_grad(OPS, case.gradient())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(9), "weight 1.*1"),
        (torch.ones(9, 17, dtype=torch.float64), "weight 1.*float32.*float16.*bfloat16"),
        (torch.ones(9, 17, dtype=torch.int32), "weight 1.*float32"),
    ],
    ids=["one dimension", "float64", "int32"],
)
@needs_kernels
def test_kernels_check_weights(case, weight, message):
    wrong = case._replace(weights=[case.weights[0], weight, case.weights[2]])
    with pytest.raises(ValueError, match=message):
        wrong.forward(OPS)
    with pytest.raises(ValueError, match=message):
        wrong.dense_grad(OPS, case.gradient())


@pytest.mark.parametrize("op", ["dense_grad", "sample_weight_grad"])
@needs_kernels
def test_kernels_check_widths_and_tables(case, op):
    grad = case.gradient()
    with pytest.raises(ValueError, match=r"feature 1.*16 wide.*table 1"):
        getattr(case._replace(dims=[4, 16, 17, 64]), op)(OPS, grad)
    with pytest.raises(ValueError, match=r"feature 3.*64 wide.*table 3"):
        getattr(case._replace(tables=[0, 1, 1, 3]), op)(OPS, grad)


@pytest.mark.parametrize("table", [-1, 3])
@needs_kernels
def test_forward_reads_tables_that_exist(case, table):
    with pytest.raises(ValueError, match=f"{table}.*3"):
        case._replace(tables=[0, 1, 1, table]).forward(OPS, out_size=12)


@needs_kernels
def test_sparse_gradients_are_of_tables_that_exist_and_of_one_width(case):
    with pytest.raises(ValueError, match=r"feature 3.*table 3.*3"):
        case._replace(tables=[0, 1, 1, 3]).sparse_grad(OPS, case.gradient())
    with pytest.raises(ValueError, match="table 1"):
        case._replace(dims=[4, 16, 18, 64]).sparse_grad(OPS, case.gradient())


def make_hyper(size=HYPER_SIZE, dtype=torch.float64):
    return torch.full([size], 0.1, dtype=dtype)


ADAGRAD, ROWWISE_ADAGRAD = OptimizerKind.ADAGRAD.code, OptimizerKind.ROW_WISE_ADAGRAD.code
SHARED_UPDATE_ERRORS = {
    **WRONG_BATCHES,
    **WRONG_WEIGHTS,
    "id": (lambda c: c._replace(values=put(c.values, first_id(c, 3, 7), 700)), BY_NUMBER),
}


def refused_update(case, ops, message, *, grad=None, state=None, optimizer=ROWWISE_ADAGRAD, **options):
    """Runs an update that must raise, then compares all that it could have written."""
    state = [torch.rand(len(weight)) for weight in case.weights] if state is None else state
    written = [*case.weights, *state]
    before = [tensor.clone() for tensor in written]
    grad = torch.ones(12, 102) if grad is None else grad
    with pytest.raises(ValueError, match=message):
        case.update(ops, grad, state, optimizer, options.pop("hyper", make_hyper()), **options)
    assert all(torch.equal(now, then) for now, then in zip(written, before, strict=True))


@pytest.mark.parametrize("name", SHARED_UPDATE_ERRORS)
@both
def test_a_refused_batch_updates_nothing(case, ops, name):
    change, message = SHARED_UPDATE_ERRORS[name]
    refused_update(change(case), ops, message)


@pytest.mark.threads
@both
def test_a_bad_id_in_a_large_batch_updates_nothing(make_case, ops, set_threads):
    """Many chunks of work, of which one meets the id."""
    set_threads(2)
    case = make_case(num_bags=((9000,) * 4,))
    case.values[-1] = 700
    refused_update(case, ops, "id 700 of feature '3'", grad=torch.ones(9000, 102))


@both
def test_updates_refuse_what_does_not_fit_the_optimizer(case, ops):
    refused_update(case, ops, "the gradient has 1122 elements", grad=torch.ones(11, 102))
    message = "got 0 state tensors for 3 tables of an optimizer with 1 state slots"
    refused_update(case, ops, message, state=[])
    message = "got 3 state tensors for 3 tables of an optimizer with 2 state slots"
    refused_update(case, ops, message, optimizer=3)
    unknown = len(FORMULAS)
    message = f"optimizer {unknown} is unknown; codes 0 to {unknown - 1} exist"
    refused_update(case, ops, message, optimizer=unknown)
    refused_update(case, ops, "optimizer -1 is unknown", optimizer=-1)
    message = "hyper must be a float64 CPU tensor with [0-9]+ entries"
    refused_update(case, ops, message, hyper=make_hyper(HYPER_SIZE - 1))
    refused_update(case, ops, message, hyper=make_hyper(dtype=torch.float32))


@needs_kernels
def test_kernels_check_what_they_write(case):
    rows = [50, 9, 700]
    for wrong in (torch.zeros(8), torch.zeros(9, dtype=torch.float64), torch.zeros(18)[::2]):
        state = [torch.zeros(50), wrong, torch.zeros(700)]
        refused_update(case, OPS, "state tensor 1 must be contiguous float32 with 9 elements", state=state)
    state = [torch.zeros(e) for e in rows]
    message = "state tensor 0 must be contiguous float32 with 200 elements"
    refused_update(case, OPS, message, state=state, optimizer=ADAGRAD)
    spread = case._replace(weights=[*case.weights[:2], torch.ones(64, 700).T])
    refused_update(spread, OPS, "weight 2 is not contiguous; an update in place needs it to be")
    refused_update(case._replace(dims=[4, 17, 17, 63]), OPS, "feature 3 is 63 wide but table 2 is not")


@needs_kernels
def test_kernels_check_sums_of_whole_rows(case):
    num_ids = case.values.numel()
    stats = torch.ones(num_ids, 3)
    refused_update(case, OPS, "row_stats belong to lookups that are not pooled", row_stats=stats)
    sequence = case._replace(pooling=[NONE] * 4, flat=True, sample_weights=None)
    message = r"row_stats must be float32 \[num_ids, 3\]"
    for wrong in (stats[1:], stats.double()):
        refused_update(sequence, OPS, message, grad=sequence.gradient(), row_stats=wrong)


@needs_kernels
def test_kernels_check_what_was_sorted_before(case):
    squares, _, runs = case.row_squares(OPS, torch.ones(12, 102))
    message = "runs are not those of this batch. Pass what tbe_row_squares gave for it"
    for wrong in (runs[1:], runs[:0], runs.int()):
        refused_update(case, OPS, message, runs=wrong, mean_squares=squares)
    message = "mean_squares must be float32 with one number for each of the sorted runs"
    for wrong in (squares[1:], squares.double()):
        refused_update(case, OPS, message, runs=runs, mean_squares=wrong)
    refused_update(case, OPS, message, mean_squares=squares)
