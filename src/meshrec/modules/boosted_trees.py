"""The sum of boosted regression trees, as a module without parameters.

Shape legend: B batch, X inputs, T trees, L levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Leaf(NamedTuple):
    """A leaf of a tree."""

    value: float


class Branch(NamedTuple):
    """A node of a tree: samples go to the left where the input is at most the threshold."""

    input: int
    threshold: float
    left: "Branch | Leaf"
    right: "Branch | Leaf"


def scaled(node: Branch | Leaf, factor: float) -> Branch | Leaf:
    """Return a node, and those below it, with all leaves multiplied by a factor."""
    if isinstance(node, Leaf):
        return Leaf(node.value * factor)
    return node._replace(left=scaled(node.left, factor), right=scaled(node.right, factor))


class BoostedTrees(nn.Module):
    """T binary trees: the leaves that a sample comes to are summed. New trees add 0 until `grow` sets them.

    Every tree has room for all nodes of L levels, so shapes do not depend on the trees that were fitted. A
    sample goes down all trees at once, level by level. Trees are buffers: checkpoints and exported programs
    have them, and optimizers do not.

    Args:
        num_trees: number of trees T.
        num_levels: number of splits L on the way to a leaf, at most.
        device: device of the buffers.
    """

    constant_buffers = ("inputs", "thresholds", "values", "roots")
    inputs: Tensor
    thresholds: Tensor
    values: Tensor
    roots: Tensor

    def __init__(self, num_trees: int, num_levels: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_trees, self.num_levels = num_trees, num_levels
        splits, leaves = 2**num_levels - 1, 2**num_levels
        self.register_buffer("inputs", torch.zeros(num_trees * splits, dtype=torch.int64, device=device))
        self.register_buffer("thresholds", torch.full((num_trees * splits,), torch.inf, device=device))
        self.register_buffer("values", torch.zeros(num_trees * leaves, device=device))
        roots = torch.arange(num_trees, device=device)
        self.register_buffer("roots", roots, persistent=False)

    def grow(self, trees: list[Branch | Leaf]) -> None:
        """Set the trees; those that are missing add 0.

        Raises:
            ValueError: there are more than T trees, or one has more than L levels.
        """
        if len(trees) > self.num_trees:
            raise ValueError(
                f"there are {len(trees)} trees, and room for {self.num_trees}. Make the module larger."
            )
        inputs, thresholds = torch.zeros_like(self.inputs), torch.full_like(self.thresholds, torch.inf)
        values = torch.zeros_like(self.values)

        def place(node: Branch | Leaf, tree: int, at: int, level: int) -> None:
            if isinstance(node, Leaf):
                # No split below: every sample goes on to the left.
                values[(tree << self.num_levels) + (at << (self.num_levels - level))] = node.value
                return
            if level == self.num_levels:
                raise ValueError(
                    f"tree {tree} has more than {self.num_levels} levels. Make the module deeper."
                )
            first = tree * ((1 << self.num_levels) - 1) + (1 << level) - 1
            inputs[first + at], thresholds[first + at] = node.input, node.threshold
            place(node.left, tree, 2 * at, level + 1)
            place(node.right, tree, 2 * at + 1, level + 1)

        for number, tree in enumerate(trees):
            place(tree, number, 0, 0)
        self.inputs.copy_(inputs)
        self.thresholds.copy_(thresholds)
        self.values.copy_(values)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sums [B] for inputs [B, X]. No gradient comes through."""
        splits = self.roots * ((1 << self.num_levels) - 1)
        at = torch.zeros(inputs.shape[0], self.num_trees, dtype=torch.int64, device=inputs.device)
        for level in range(self.num_levels):
            nodes = at + (splits + ((1 << level) - 1))
            goes_right = inputs.gather(1, self.inputs[nodes]) > self.thresholds[nodes]
            at = 2 * at + goes_right
        return self.values[at + (self.roots << self.num_levels)].sum(1)
