"""Boosted regression trees, evaluated on tensors by a module without parameters.

Shape legend: B batch, X inputs, T trees, L levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Leaf(NamedTuple):
    """A leaf of a regression tree: the tree returns ``value``."""

    value: float


class Branch(NamedTuple):
    """An inner node of a regression tree.

    A sample continues in ``left`` if the column ``input`` of the sample is at most ``threshold``, else in
    ``right``.
    """

    input: int
    threshold: float
    left: "Branch | Leaf"
    right: "Branch | Leaf"


def scale_leaves(node: Branch | Leaf, factor: float) -> Branch | Leaf:
    """Return a copy of a tree with all leaf values multiplied by ``factor``."""
    if isinstance(node, Leaf):
        return Leaf(node.value * factor)
    return node._replace(left=scale_leaves(node.left, factor), right=scale_leaves(node.right, factor))


class BoostedTrees(nn.Module):
    """Sum of T binary regression trees. At first, all trees return 0; call `set_trees` with fitted trees.

    Every tree is stored as a complete binary tree with L levels, so tensor shapes do not depend on the
    fitted trees. All samples descend all trees at once, level by level. Trees are stored in buffers, so
    checkpoints and exported programs contain them, but optimizers do not change them.

    Args:
        num_trees: Tree count T.
        num_levels: Maximum number of splits L between the root and a leaf.
        device: Device for the buffers.
    """

    # Read by export: these buffers may be folded into a program as constants.
    constant_buffers = ("inputs", "thresholds", "values", "roots")
    inputs: Tensor  # input that each inner node compares, tree by tree in level order, [T * (2^L - 1)]
    thresholds: Tensor  # inner node thresholds, in the same order
    values: Tensor  # leaf values, tree by tree, [T * 2^L]
    roots: Tensor  # 0 to T - 1; a buffer, so it moves with the module

    def __init__(self, num_trees: int, num_levels: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_trees, self.num_levels = num_trees, num_levels
        splits, leaves = 2**num_levels - 1, 2**num_levels
        self.register_buffer("inputs", torch.zeros(num_trees * splits, dtype=torch.int64, device=device))
        # Threshold inf: all samples go left, to a leaf with the value 0.
        self.register_buffer("thresholds", torch.full((num_trees * splits,), torch.inf, device=device))
        self.register_buffer("values", torch.zeros(num_trees * leaves, device=device))
        roots = torch.arange(num_trees, device=device)
        self.register_buffer("roots", roots, persistent=False)

    def set_trees(self, trees: list[Branch | Leaf]) -> None:
        """Replace all trees in the module. With fewer than ``num_trees`` trees, the missing ones return 0.

        Raises:
            ValueError: There are more trees than ``num_trees``, or a tree has more levels than
                ``num_levels``. The module is unchanged.
        """
        if len(trees) > self.num_trees:
            raise ValueError(
                f"there are {len(trees)} trees, and room for {self.num_trees}. Make the module larger."
            )
        inputs, thresholds = torch.zeros_like(self.inputs), torch.full_like(self.thresholds, torch.inf)
        # Filled aside and copied at the end, so an error leaves the trees unchanged.
        values = torch.zeros_like(self.values)

        def fill(node: Branch | Leaf, tree: int, index: int, level: int) -> None:
            """Write a subtree to the new buffers.

            Args:
                index: Position of ``node`` in the level, from 0 on the left.
            """
            if isinstance(node, Leaf):
                # Threshold inf below a shallow leaf: samples go left down to this leaf's slot.
                values[(tree << self.num_levels) + (index << (self.num_levels - level))] = node.value
                return
            if level == self.num_levels:
                raise ValueError(
                    f"tree {tree} has more than {self.num_levels} levels. Make the module deeper."
                )
            # Index of the first node in this level: all trees before, then all levels above.
            first = tree * ((1 << self.num_levels) - 1) + (1 << level) - 1
            inputs[first + index], thresholds[first + index] = node.input, node.threshold
            fill(node.left, tree, 2 * index, level + 1)
            fill(node.right, tree, 2 * index + 1, level + 1)

        for tree_index, tree in enumerate(trees):
            fill(tree, tree_index, 0, 0)
        self.inputs.copy_(inputs)
        self.thresholds.copy_(thresholds)
        self.values.copy_(values)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum over all trees for every sample, [B]. Has no gradient."""
        shape, depth = (inputs.shape[0], self.num_trees), self.num_levels
        # Index of every tree's root among all inner nodes, [T].
        roots = self.roots * ((1 << depth) - 1)
        # The position of every sample in the current level of every tree, [B, T]. All samples compare the
        # same columns at the roots. index_select takes a third of the time of an index of two dimensions.
        columns = inputs.index_select(1, self.inputs.index_select(0, roots))
        position = (columns > self.thresholds.index_select(0, roots)).long()
        # Samples in shallow trees continue left below a leaf, so that all trees take L steps without
        # branches.
        for level in range(1, depth):
            nodes = (position + (roots + ((1 << level) - 1))).view(-1)
            columns = inputs.gather(1, self.inputs.index_select(0, nodes).view(shape))
            position = 2 * position + (columns > self.thresholds.index_select(0, nodes).view(shape))
        # In the last level, the position is the index of the leaf.
        leaves = (position + (self.roots << depth)).view(-1)
        return self.values.index_select(0, leaves).view(shape).sum(1)
