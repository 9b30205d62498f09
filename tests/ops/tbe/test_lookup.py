import pytest
import torch

from meshrec.ops import tbe

# Table 0 ([6, 2]) is read by features 0 and 2, table 1 ([5, 3]) by feature 1; key 1 is read twice.
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt0\tb\n"), dtype=torch.uint8)
OPTIONS = tbe.LookupOptions(2, torch.float32, True, NAMES)


def make_lookups(sample_weights=None):
    return tbe.Lookups(
        values=torch.tensor([1, 2, 1, 4, 0]),
        offsets=torch.tensor([0, 2, 3, 3, 5]),
        per_sample_weights=sample_weights,
        segments=None,
        num_keys=2,
        keys=[0, 1, 1],
        tables=[0, 1, 0],
        pooling=[0, 1, 0],
        flat=False,
        dims=[2, 3, 2],
    )


def make_weights():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2, generator=generator), torch.randn(5, 3, generator=generator)]


def by_hand(weights, scale=None):
    """Key 0 holds the bags [1 2] [1], key 1 the bags [] [4 0]."""
    w0, w1 = weights
    a = torch.ones(5) if scale is None else scale
    none2, none3 = torch.zeros(2), torch.zeros(3)
    return torch.stack(
        [
            torch.cat([a[0] * w0[1] + a[1] * w0[2], none3, none2]),
            torch.cat([a[2] * w0[1], (a[3] * w1[4] + a[4] * w1[0]) / 2, a[3] * w0[4] + a[4] * w0[0]]),
        ]
    )


class Recorder:
    def __init__(self):
        self.taken = []

    def foreign_writes(self, weights):
        return [weight._version for weight in weights]

    def check_tables(self, before):
        assert before

    def apply_gradient(self, grad, lookups):
        self.taken.append((grad.clone(), lookups))


def plain_gradients(grad, scale=None):
    weights = [weight.requires_grad_() for weight in make_weights()]
    inputs = [*weights] if scale is None else [*weights, scale.detach().requires_grad_()]
    return torch.autograd.grad((by_hand(weights, None if scale is None else inputs[-1]) * grad).sum(), inputs)


def test_forward():
    torch.testing.assert_close(tbe.forward(make_weights(), make_lookups(), OPTIONS), by_hand(make_weights()))


def test_gradients_of_weights_and_sample_weights():
    weights = [weight.requires_grad_() for weight in make_weights()]
    scale, grad = torch.rand(5), torch.randn(2, 7)
    sample_weights = scale.clone().requires_grad_()
    tbe.forward(weights, make_lookups(sample_weights), OPTIONS).backward(grad)
    expected = plain_gradients(grad, scale)
    for tensor, gradient in zip([*weights, sample_weights], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_dense_sparse_and_sample_weight_gradients_agree_with_autograd():
    scale, grad = torch.rand(5), torch.randn(2, 7)
    *expected, expected_scale = plain_gradients(grad, scale)
    lookups = make_lookups(scale)
    dense = tbe.dense_grad(grad, make_weights(), lookups)
    sparse = tbe.sparse_grad(grad, lookups, [6, 5])
    assert [rows.tolist() for rows, _ in sparse] == [[0, 1, 2, 4], [0, 4]]
    for table, gradient in enumerate(expected):
        torch.testing.assert_close(dense[table], gradient)
        rows, grads = sparse[table]
        torch.testing.assert_close(torch.zeros_like(gradient).index_copy(0, rows, grads), gradient)
    torch.testing.assert_close(tbe.sample_weight_grad(grad, make_weights(), lookups), expected_scale)


def test_lookups_of_some_tables_count_them_anew():
    lookups = make_lookups()
    assert lookups.of_tables([1]).tables == [-1, 0, -1]
    assert lookups.of_tables([1, 0]).tables == [1, 0, 1]
    grad = torch.randn(2, 7)
    (only,) = tbe.dense_grad(grad, make_weights()[1:], lookups.of_tables([1]))
    torch.testing.assert_close(only, plain_gradients(grad)[1])


def test_fused_forward_hands_the_gradient_to_the_updater():
    weights = [weight.requires_grad_() for weight in make_weights()]
    updater, lookups, grad = Recorder(), make_lookups(), torch.randn(2, 7)
    result = tbe.fused_forward(weights, lookups, updater, [], OPTIONS)
    assert torch.equal(result, tbe.forward(weights, lookups, OPTIONS))
    assert updater.taken == []
    result.backward(grad)
    ((taken, given),) = updater.taken
    assert torch.equal(taken, grad)
    assert given is lookups
    assert all(weight.grad is None for weight in weights)


def test_fused_forward_gives_plain_tables_their_gradients():
    weights = [weight.requires_grad_() for weight in make_weights()]
    updater, grad = Recorder(), torch.randn(2, 7)
    tbe.fused_forward(weights, make_lookups(), updater, [1], OPTIONS).backward(grad)
    assert len(updater.taken) == 1
    assert weights[0].grad is None
    torch.testing.assert_close(weights[1].grad, plain_gradients(grad)[1])


def test_fused_forward_gives_sample_weights_their_gradient_before_the_update():
    class Eraser(Recorder):
        def apply_gradient(self, grad, lookups):
            for weight in weights:
                weight.zero_()

    weights, scale, grad = make_weights(), torch.rand(5), torch.randn(2, 7)
    sample_weights = scale.clone().requires_grad_()
    tbe.fused_forward(weights, make_lookups(sample_weights), Eraser(), [], OPTIONS).backward(grad)
    torch.testing.assert_close(sample_weights.grad, plain_gradients(grad, scale)[2])
    assert not any(weight.any() for weight in weights)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_fused_forward_is_refused_inside_transforms(transform):
    weights = make_weights()

    def loss(scale):
        return (tbe.fused_forward(weights, make_lookups(), Recorder(), [], OPTIONS) * scale).sum()

    with pytest.raises(ValueError, match=r"torch.func"):
        transform(loss)(torch.ones(2, 1))


def test_a_failed_lookup_names_table_and_feature():
    lookups = make_lookups()._replace(values=torch.tensor([1, 2, 1, 5, 0]))
    with pytest.raises(ValueError, match=r"'t1'.*id 5.*'b'.*sample 1.*\[0.*5"):
        tbe.fused_forward(make_weights(), lookups, Recorder(), [], OPTIONS)
