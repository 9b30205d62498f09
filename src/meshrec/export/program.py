"""Export a model as a program which takes the weights as inputs, so that they stay outside the program."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.data.raw_values import DENSE
from meshrec.export.calling import call_with
from meshrec.export.sharing import compute_once
from meshrec.modules import EmbeddingCollection
from meshrec.sparse import KeyedJaggedTensor

# B samples, R shared rows (a row per user with several samples), F features, N IDs, V vector width


class Program(nn.Module):
    """A model as a function of weights and a batch, which returns scores [B] or vectors [B, V].

    Weights are arguments instead of constants, so tables stay in a single mapped file, and a server may
    pass other weights in every call.

    Samples may share features, for example all candidate items for one user share the user features. The
    batch then has R shared rows, and the argument ``group`` [B] has the index of every sample's shared row.
    Lengths of shared features are [R] instead of [B], and dense is [R, num_dense] if it is shared. Shared
    features are looked up once per shared row, not once per sample. `export_program` extends this to all
    values that depend only on shared features. Features of an EmbeddingCollection (a vector per
    ID) are repeated per sample before the lookup.

    Args:
        model: called as ``model(dense, sparse)``; returns logits, [B] or [B, 1].
        names: parameter and buffer names, in the order of the argument ``weights``.
        features: keys of ``sparse``.
        scores: function from float32 logits [B] to scores; None: the model returns vectors [B, V].
        shared: features (or "dense") shared by samples.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        features: Sequence[str],
        scores: Callable[[Tensor], Tensor] | None = torch.sigmoid,
        shared: Sequence[str] = (),
    ) -> None:
        super().__init__()
        # In a list, so it is not a child module, whose parameters would become constants of the program.
        self._model = [model]
        self._names, self._features = list(names), list(features)
        self._scores, self._shared = scores, frozenset(shared)
        # Not pooled, so every sample needs a copy of the bags.
        self._repeated = self._shared & _unpooled(model)

    def forward(
        self,
        weights: list[Tensor],
        dense: Tensor,
        values: list[Tensor],
        lengths: list[Tensor],
        group: Tensor | None = None,
    ) -> Tensor:
        """Compute scores [B] or vectors [B, V].

        Args:
            weights: parameters and buffers, in the order of ``names``.
            dense: dense values, float32 [B, num_dense].
            values: for every feature, the IDs, int64 [N], sample by sample.
            lengths: for every feature, the number of IDs per sample, int64 [B].
            group: index of every sample's shared row, int64 [B]; None: samples share nothing.

        Raises:
            ValueError: the model returns several outputs per sample.
        """
        if group is None:
            sparse = KeyedJaggedTensor(
                self._features, values=torch.cat(values), lengths=torch.cat(lengths), stride=dense.shape[0]
            )
        else:
            sample_rows = torch.arange(group.shape[0])
            # Features that are looked up once per shared row. Others are repeated per sample before the
            # lookup.
            once = self._shared - self._repeated
            # For every feature, the bag that each sample reads.
            rows_FB = torch.stack([group if name in once else sample_rows for name in self._features])
            bags = [
                _repeat_bags(ids, counts, group) if name in self._repeated else (ids, counts)
                for name, ids, counts in zip(self._features, values, lengths, strict=True)
            ]
            values, lengths = map(list, zip(*bags, strict=True))
            sparse = KeyedJaggedTensor(
                self._features,
                values=torch.cat(values),
                lengths=torch.cat(lengths),
                # Shared features have a bag per shared row, other features a bag per sample.
                stride_per_key_per_rank=[[counts_of_feature.shape[0]] for counts_of_feature in lengths],
                inverse_indices=(self._features, rows_FB),
            )
            if DENSE in self._shared:
                dense = dense.index_select(0, group)
        state = dict(zip(self._names, weights, strict=True))
        outputs: Tensor = call_with(self._model[0], state, dense, sparse)
        if self._scores is None:
            if outputs.dim() != 2:
                raise ValueError(
                    f"the model returns {tuple(outputs.shape[1:])} per sample, but a package of vectors "
                    "returns one vector. Export a module which returns [B, V]"
                )
            return outputs.float()
        if outputs.dim() > 2 or (outputs.dim() == 2 and outputs.shape[1] != 1):
            raise ValueError(
                f"the model returns {tuple(outputs.shape[1:])} outputs per sample, but a package returns "
                "one score. Export a module which returns one of them"
            )
        return self._scores(outputs.reshape(-1).float())


def _unpooled(model: nn.Module) -> set[str]:
    """Return the features which the model looks up without pooling, in an EmbeddingCollection."""
    return {
        feature
        for module in model.modules()
        if isinstance(module, EmbeddingCollection)
        for config in module.embedding_configs()
        for feature in config.feature_names
    }


def _repeat_bags(ids: Tensor, lengths_R: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the bags of R shared rows for B samples."""
    # ID n in the result is ID n + shift_N[n] in `ids`.
    firsts_R = lengths_R.cumsum(0) - lengths_R
    lengths_B = lengths_R.index_select(0, group_B)
    shift_B = firsts_R.index_select(0, group_B) - (lengths_B.cumsum(0) - lengths_B)
    shift_N = torch.repeat_interleave(shift_B, lengths_B)
    return ids.index_select(0, torch.arange(shift_N.shape[0]) + shift_N), lengths_B


def export_program(
    program: Program,
    weights: Sequence[Tensor],
    features: Sequence[str],
    num_dense: int,
    shared: Sequence[str] = (),
    *,
    growing: Sequence[bool] = (),
) -> "torch.export.ExportedProgram":
    """Export a program with torch.export, for any batch size.

    Args:
        program: program to export.
        weights: example weights, in the program's order.
        features: feature names.
        num_dense: number of columns in the dense input.
        shared: features (or "dense") that samples share.
        growing: for every weight, whether the row count may change later, as in hashed tables.

    Raises:
        Exception: any error from torch.export or the model.
    """
    inputs = example_inputs(weights, num_dense, features, shared)
    any_size = {0: torch.export.Dim.DYNAMIC}
    per_feature = [any_size for _ in features]
    # The first dimension is dynamic for weights whose row count may change.
    rows = [any_size if grows else None for grows in growing] or [None] * len(weights)
    for index, weight in enumerate(weights):
        if rows[index] and weight.dim() == 2 and weight.shape[0] == 2 and weight.dtype == torch.int64:
            rows[index] = {1: torch.export.Dim.DYNAMIC}  # [2, m]: keys and row indices
    shapes: Any = (rows, any_size, per_feature, list(per_feature))
    if shared:
        shapes = (*shapes, any_size)
    with torch.no_grad():
        # Errors of the model itself are clearer in a plain call than inside torch.export.
        program(*inputs)
        exported_program = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
        if shared:
            group = next(node for node in exported_program.graph.nodes if node.name == "group")
            compute_once(exported_program.graph, group)
    return exported_program


def example_inputs(
    weights: Sequence[Tensor], num_dense: int, features: Sequence[str], shared: Sequence[str]
) -> tuple[Any, ...]:
    """Return example arguments with which torch.export traces a `Program`.

    Args:
        weights, num_dense, features, shared: as for `export_program`.
    """
    # All sizes differ, because torch.export takes equal sizes for the same dimension.
    batch, rows = 5, 3
    values, lengths = [], []
    for num_ids, feature in enumerate(features, start=batch + 2):
        counts = torch.ones(rows if feature in shared else batch, dtype=torch.int64)
        counts[0] += num_ids - len(counts)
        lengths.append(counts)
        values.append(torch.zeros(num_ids, dtype=torch.int64))
    dense = torch.zeros(rows if DENSE in shared else batch, num_dense)
    inputs = (list(weights), dense, values, lengths)
    return (*inputs, torch.arange(batch) % rows) if shared else inputs
