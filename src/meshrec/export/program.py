"""A model as one function of its weights, which a package keeps beside the program."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshrec.sparse import KeyedJaggedTensor

# B samples, F features, N ids


class Program(nn.Module):
    """``(weights, dense [B, num_dense], per feature ids [N] and lengths [B]) -> scores [B]``.

    Weights are arguments, not constants: the program holds none of them, so that the tables stay in one
    mapped file, and a server may hand over other ones from one call to the next.

    Args:
        model: called as ``model(dense, sparse)`` it gives logits, [B] or [B, 1].
        names: of its parameters and buffers, in the order of ``weights``.
        features: the keys of ``sparse``.
        scores: what requests are told, of logits [B] in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        features: Sequence[str],
        scores: Callable[[Tensor], Tensor] = torch.sigmoid,
    ) -> None:
        super().__init__()
        # Not a child: its parameters must not become constants of the program.
        self._model = [model]
        self._names, self._features = list(names), list(features)
        self._scores = scores

    def forward(
        self, weights: list[Tensor], dense: Tensor, values: list[Tensor], lengths: list[Tensor]
    ) -> Tensor:
        """The scores.

        Raises:
            ValueError: the model gives several outputs for each sample.
        """
        sparse = KeyedJaggedTensor(
            self._features, values=torch.cat(values), lengths=torch.cat(lengths), stride=dense.shape[0]
        )
        state = dict(zip(self._names, weights, strict=True))
        logits: Tensor = torch.func.functional_call(self._model[0], state, (dense, sparse))
        if logits.dim() > 2 or (logits.dim() == 2 and logits.shape[1] != 1):
            raise ValueError(
                f"the model gives {tuple(logits.shape[1:])} outputs for each sample, and a package gives one "
                "score. Export a module that returns one of them"
            )
        return self._scores(logits.reshape(-1).float())


def example_inputs(
    weights: Sequence[Tensor], num_dense: int, num_features: int, *, batch: int = 3
) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    """Arguments of a `Program`, no two sizes alike: an exporter takes equal sizes for one size."""
    values = [torch.zeros(batch + 2 + feature, dtype=torch.int64) for feature in range(num_features)]
    lengths = []
    for feature in range(num_features):
        own = torch.ones(batch, dtype=torch.int64)
        own[0] += 2 + feature
        lengths.append(own)
    return list(weights), torch.zeros(batch, num_dense), values, lengths
