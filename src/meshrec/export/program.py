"""A model as one function of its weights, which a package keeps beside the program."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.export.calling import call_with
from meshrec.export.sharing import compute_once
from meshrec.modules import EmbeddingCollection
from meshrec.sparse import KeyedJaggedTensor

DENSE = "dense"
"""The name of the dense values in requests and in lists of shared features."""

# B samples, R requests (of one user and several samples each), F features, N ids, V width of vectors


class Program(nn.Module):
    """A model as a function of its weights and of a batch.

    Its arguments are the weights, dense values [B, num_dense], and per feature ids [N] and lengths [B]; it
    returns scores [B]. Weights are arguments and not constants, so that the tables stay in one mapped file,
    and a server may pass other weights from one call to the next.

    With ``shared`` features there is one more argument, ``group`` [B]: each sample's row of the shared
    values. Lengths of shared features are then [R], and so is dense ([R, num_dense]) if it is shared. Shared
    features are looked up once per row, not once per sample, and `exported` computes what depends on them
    alone once per row, too. Features of an EmbeddingCollection, which gives a vector for each id, are
    repeated for each sample before the lookup.

    Args:
        model: called as ``model(dense, sparse)`` it gives logits, [B] or [B, 1].
        names: of its parameters and buffers, in the order of ``weights``.
        features: the keys of ``sparse``.
        scores: maps logits [B] in float32 to scores; None if the model gives vectors [B, V].
        shared: the features that samples share.
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
        # Not a child: its parameters must not become constants of the program.
        self._model = [model]
        self._names, self._features = list(names), list(features)
        self._scores, self._shared = scores, frozenset(shared)
        self._repeated = self._shared & _unpooled(model)

    def forward(
        self,
        weights: list[Tensor],
        dense: Tensor,
        values: list[Tensor],
        lengths: list[Tensor],
        group: Tensor | None = None,
    ) -> Tensor:
        """Compute the scores [B], or vectors [B, V].

        Raises:
            ValueError: the model gives several outputs for each sample.
        """
        if group is None:
            sparse = KeyedJaggedTensor(
                self._features, values=torch.cat(values), lengths=torch.cat(lengths), stride=dense.shape[0]
            )
        else:
            own = torch.arange(group.shape[0])
            once = self._shared - self._repeated
            rows_FB = torch.stack([group if name in once else own for name in self._features])
            bags = [
                _repeated(ids, counts, group) if name in self._repeated else (ids, counts)
                for name, ids, counts in zip(self._features, values, lengths, strict=True)
            ]
            values, lengths = map(list, zip(*bags, strict=True))
            sparse = KeyedJaggedTensor(
                self._features,
                values=torch.cat(values),
                lengths=torch.cat(lengths),
                stride_per_key_per_rank=[[each.shape[0]] for each in lengths],
                inverse_indices=(self._features, rows_FB),
            )
            if DENSE in self._shared:
                dense = dense.index_select(0, group)
        state = dict(zip(self._names, weights, strict=True))
        outputs: Tensor = call_with(self._model[0], state, dense, sparse)
        if self._scores is None:
            if outputs.dim() != 2:
                raise ValueError(
                    f"the model gives {tuple(outputs.shape[1:])} for each sample, and a package of vectors "
                    "gives one vector. Export a module that returns [B, V]"
                )
            return outputs.float()
        if outputs.dim() > 2 or (outputs.dim() == 2 and outputs.shape[1] != 1):
            raise ValueError(
                f"the model gives {tuple(outputs.shape[1:])} outputs for each sample, and a package gives "
                "one score. Export a module that returns one of them"
            )
        return self._scores(outputs.reshape(-1).float())


def _unpooled(model: nn.Module) -> set[str]:
    """Return the features whose ids are looked up without pooling."""
    return {
        feature
        for module in model.modules()
        if isinstance(module, EmbeddingCollection)
        for config in module.embedding_configs()
        for feature in config.feature_names
    }


def _repeated(ids: Tensor, lengths_R: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the bags of rows for the samples that share them."""
    firsts_R = lengths_R.cumsum(0) - lengths_R
    lengths_B = lengths_R.index_select(0, group_B)
    shift_B = firsts_R.index_select(0, group_B) - (lengths_B.cumsum(0) - lengths_B)
    shift_N = torch.repeat_interleave(shift_B, lengths_B)
    return ids.index_select(0, torch.arange(shift_N.shape[0]) + shift_N), lengths_B


def exported(
    program: Program,
    weights: Sequence[Tensor],
    features: Sequence[str],
    num_dense: int,
    shared: Sequence[str] = (),
    *,
    growing: Sequence[bool] = (),
) -> "torch.export.ExportedProgram":
    """Build an exported program for batches of any size.

    ``growing`` tells for each weight whether it may have any number of rows.

    Raises:
        Exception: torch.export or the model raised it; of any type.
    """
    inputs = example_inputs(weights, num_dense, features, shared)
    any_size = {0: torch.export.Dim.DYNAMIC}
    each = [any_size for _ in features]
    rows = [any_size if grows else None for grows in growing] or [None] * len(weights)
    for place, weight in enumerate(weights):
        if rows[place] and weight.dim() == 2 and weight.shape[0] == 2 and weight.dtype == torch.int64:
            rows[place] = {1: torch.export.Dim.DYNAMIC}  # keys and rows, one below the other
    shapes: Any = (rows, any_size, each, list(each))
    if shared:
        shapes = (*shapes, any_size)
    with torch.no_grad():
        program(*inputs)
        found = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
        if shared:
            group = next(node for node in found.graph.nodes if node.name == "group")
            compute_once(found.graph, group)
    return found


def example_inputs(
    weights: Sequence[Tensor], num_dense: int, features: Sequence[str], shared: Sequence[str]
) -> tuple[Any, ...]:
    """Make arguments of a `Program` whose sizes all differ, since torch.export would unify equal sizes."""
    batch, rows = 5, 3
    values, lengths = [], []
    for num_ids, feature in enumerate(features, start=batch + 2):
        own = torch.ones(rows if feature in shared else batch, dtype=torch.int64)
        own[0] += num_ids - len(own)
        lengths.append(own)
        values.append(torch.zeros(num_ids, dtype=torch.int64))
    dense = torch.zeros(rows if DENSE in shared else batch, num_dense)
    inputs = (list(weights), dense, values, lengths)
    return (*inputs, torch.arange(batch) % rows) if shared else inputs
