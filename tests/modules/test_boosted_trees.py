import pytest
import torch

from meshrec.modules.boosted_trees import BoostedTrees, Branch, Leaf


def drawn(generator, level):
    if level == 0 or torch.rand((), generator=generator) < 0.2:
        return Leaf(float(torch.randn((), generator=generator)))
    at = int(torch.randint(0, 5, (), generator=generator))
    threshold = float(torch.randint(-2, 3, (), generator=generator))
    return Branch(at, threshold, drawn(generator, level - 1), drawn(generator, level - 1))


def plain(node, sample):
    while isinstance(node, Branch):
        node = node.left if sample[node.input] <= node.threshold else node.right
    return node.value


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_of_leaves_is_that_of_a_plain_walk(seed):
    generator = torch.Generator().manual_seed(seed)
    trees = [drawn(generator, 3) for _ in range(7)]
    module = BoostedTrees(9, 3)
    inputs = torch.randint(-3, 4, (50, 5), generator=generator).float()
    assert torch.equal(module(inputs), torch.zeros(50))
    module.set_trees(trees)
    expected = [sum(plain(tree, sample) for tree in trees) for sample in inputs.tolist()]
    assert torch.allclose(module(inputs), torch.tensor(expected), atol=1e-5)
    module.set_trees(trees[:1])
    assert torch.allclose(module(inputs), torch.tensor([plain(trees[0], each) for each in inputs.tolist()]))


def test_trees_that_do_not_fit_are_refused():
    deep = Branch(0, 0.0, Leaf(1.0), Branch(0, 1.0, Leaf(2.0), Leaf(3.0)))
    with pytest.raises(ValueError, match=r"2 trees.*1"):
        BoostedTrees(1, 2).set_trees([deep, deep])
    with pytest.raises(ValueError, match=r"tree 0.*1 levels"):
        BoostedTrees(1, 1).set_trees([deep])


def test_exports_for_batches_of_any_size():
    module, inputs = BoostedTrees(3, 2), torch.randn(5, 2)
    module.set_trees([Branch(1, 0.0, Leaf(1.0), Leaf(2.0))])
    program = torch.export.export(module, (inputs,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    more = torch.randn(9, 2)
    assert torch.equal(program.module()(more), module(more))
