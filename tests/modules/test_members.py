import torch

from meshrec.modules import MemberLinear, MemberMLP


def test_a_member_scales_the_columns_of_input_and_output():
    torch.manual_seed(0)
    layer = MemberLinear(4, 3, 2, signs=True)
    with torch.no_grad():
        layer.out_scale.normal_()
    x = torch.randn(5, 2, 4)
    for member in range(2):
        expected = (x[:, member] * layer.in_scale[member]) @ layer.weight.T * layer.out_scale[member]
        assert torch.allclose(layer(x)[:, member], expected + layer.bias[member], atol=1e-6)
    assert layer.in_scale.abs().eq(1).all()


def test_an_mlp_of_one_member_is_an_mlp():
    torch.manual_seed(0)
    mlp = MemberMLP(4, [8, 6], 2, 1)
    x = torch.randn(5, 4)
    first, second = mlp.layers[0], mlp.layers[3]
    hidden = torch.relu(torch.relu(x @ first.weight.T + first.bias[0]) @ second.weight.T + second.bias[0])
    expected = hidden @ mlp.head[0].T + mlp.bias[0]
    assert torch.allclose(mlp(x).squeeze(2), expected, atol=1e-6)


def test_members_differ():
    torch.manual_seed(0)
    out = MemberMLP(4, [8], 1, 3)(torch.randn(5, 4))
    assert out.shape == (5, 1, 3)
    assert not torch.allclose(out[..., 0], out[..., 1])
