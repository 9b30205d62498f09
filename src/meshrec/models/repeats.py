"""Scores for items that a user had before, by how often and how recently the user had them.

[Note: repeated items]

In some logs users take items again, such as songs. With ``SampledSoftmax.repeats``, a next-item model scores
an item outside the user's history by its similarity to the query, and an item in the history by

    ``g * t * similarity + w @ f + o``

``f`` has six values: 1, the log of the item's count in the history, the logs of two counts that decay with
age, the log of 1 + age, and whether it is the last item. The age of an occurrence is the number of later
items in the history; an item has the age of the last occurrence.

``g`` and ``w`` are trained. ``g`` starts at 0: at first, history items are ranked only by the user's counts.
The similarity gets a weight only as far as it helps.

The training loss compares a target with all items in the history, and with sampled other items. Sampling
alone would hardly ever draw an item from the history. The model would then not learn how many history items
are not repeated. Evaluation, recommendations and packages compute the same scores from the same history.

``o`` and ``t`` are selected on validation data; in training they are 0 and 1. Similarities fit the training
data better than other data. On other data, they give too much probability to items outside the history, and
decide too much about the order within the history. A larger ``o`` and a smaller ``t`` correct this. With the
largest ``o`` and with ``t = 0``, history items come first, ordered by ``w @ f``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.settings import SelectedSettings
from meshrec.sparse import JaggedTensor

# B samples, L items in the longest history, P prefixes per history, N (sample, item) pairs

_HALF_LIVES = (8.0, 32.0)
"""For the two decaying counts: how many later items halve the weight of an occurrence."""
_WEIGHT_SCALE = 30.0
"""``w`` is the trained parameter times this factor. Adam moves a parameter by about its learning rate per
step. With a rate of 1e-3 and no factor, ``w`` would need a whole training run to reach the size of a log
count.
"""
_PADDING_ID = -(1 << 63)
"""ID at padded history positions, which is not an item's ID."""


class PrefixItems(NamedTuple):
    """Distinct items in history prefixes: P prefixes per history, for B histories.

    An item is represented by the position of its last occurrence in the prefix. For example, in the history
    [7, 9, 7], item 7 is at position 0 in the prefix with length 2, and at position 2 in the whole history.
    """

    ids_BL: Tensor
    """Item IDs in the padded histories, int64."""
    is_last_BPL: Tensor
    """Whether position l is in prefix p, and holds the last occurrence of this item in the prefix."""
    scores_BPL: Tensor
    """``w @ f`` for the item at position l in prefix p; undefined where ``is_last_BPL`` is false."""


class RepeatedItems(NamedTuple):
    """Terms for scoring the items in B histories: N pairs of a sample and a history item.

    Pair n has the score ``factor * similarity + additions_N[n]``, see [Note: repeated items].

    Attributes:
        sample_N: Sample index per pair, int64.
        ids_N: Item ID per pair, int64. A sample has an item at most once.
        additions_N: Term added to the similarity per pair, ``w @ f + o``.
        factor: Factor for the similarity, ``g * t``, a scalar.
    """

    sample_N: Tensor
    ids_N: Tensor
    additions_N: Tensor
    factor: Tensor

    def select(self, index: Tensor | slice) -> "RepeatedItems":
        """Return some of the pairs, by a slice, indices or a mask."""
        return self._replace(
            sample_N=self.sample_N[index], ids_N=self.ids_N[index], additions_N=self.additions_N[index]
        )


class RepeatScores(SelectedSettings):
    """Parameters of the scores for items that are in a user's history; see [Note: repeated items].

    Parameter ``weight`` has the trained values: ``g``, the factor for the similarity, and ``w`` divided by
    `_WEIGHT_SCALE`, the weights for an item's counts and age in the history. Buffer ``chosen`` has two
    values selected on validation data: ``o``, an offset, and ``t``, another factor for the similarity.

    Args:
        num_items: number of items that are ranked.
        max_length: maximum history length, in items.
        device: device for the weights.
    """

    # ``o``, then ``t``.
    candidates = ((-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.0, 0.25, 0.5, 1.0))

    def __init__(self, num_items: int, max_length: int, *, device: torch.device | None = None) -> None:
        super().__init__((0.0, 1.0), device=device)
        # With these initial values, history items together get about half the probability, divided by their
        # recent counts.
        bias = max(math.log(num_items / max_length), 0.0)
        initial = [bias, 0.0, *(1 / len(_HALF_LIVES) for _ in _HALF_LIVES), 0.0, 0.0]
        # ``g``, then ``w`` divided by the scale, float32 [7].
        self.weight = nn.Parameter(
            torch.tensor([0.0, *(value / _WEIGHT_SCALE for value in initial)], device=device)
        )


def prefix_items(weight_F: Tensor, history: JaggedTensor, stops_BP: Tensor) -> PrefixItems:
    """Find the distinct items in every history prefix, and score every item by count and age in the prefix.

    The score is ``w @ f`` in [Note: repeated items]. An item's age is the number of later items.

    Args:
        weight_F: ``RepeatScores.weight``, float32 [7].
        history: B bags with item IDs, oldest first.
        stops_BP: lengths of P prefixes per history, int64.
    """
    ids, lengths_B = history.values().long(), history.lengths().long()
    longest, device = max(int(lengths_B.max()) if len(lengths_B) else 0, 1), ids.device
    position_L = torch.arange(longest, device=device)
    is_item_BL = position_L < lengths_B[:, None]
    index_BL = history.offsets()[:-1].long()[:, None] + position_L
    padded_ids = torch.cat([ids, ids.new_full((1,), _PADDING_ID)])
    ids_BL = padded_ids[torch.where(is_item_BL, index_BL, len(ids))]
    is_equal_BLL = (ids_BL[:, :, None] == ids_BL[:, None, :]) & is_item_BL[:, :, None]
    # Pairs (l, m) of the same item with m after l.
    is_later_BLL = is_equal_BLL & (position_L > position_L[:, None])
    # The next occurrence of the item at l; the maximum where there is none.
    next_BL = torch.where(is_later_BLL.any(2), is_later_BLL.int().argmax(2), torch.iinfo(torch.int64).max)
    # Number of later items in the prefix; negative behind the prefix.
    age_BPL = stops_BP[:, :, None] - 1 - position_L
    is_inside_BPL = age_BPL >= 0
    is_last_BPL = is_inside_BPL & is_item_BL[:, None] & (next_BL[:, None] >= stops_BP[:, :, None])
    occurrences_BLL = is_equal_BLL.to(weight_F.dtype)
    age_BPL = age_BPL.clamp(min=0).to(weight_F.dtype)
    weight = weight_F[1:] * _WEIGHT_SCALE
    scores_BPL = weight[0] + weight[-2] * torch.log1p(age_BPL) + weight[-1] * (age_BPL == 0)
    for half_life, weight_of_count in zip((math.inf, *_HALF_LIVES), weight[1:-2], strict=True):
        decay_BPL = torch.exp2(-age_BPL / half_life) * is_inside_BPL
        # Positions that hold no last occurrence may have a count of 0, whose log would give NaN gradients.
        counts_BPL = (decay_BPL @ occurrences_BLL).masked_fill(~is_last_BPL, 1.0)
        scores_BPL = scores_BPL + weight_of_count * counts_BPL.log()
    return PrefixItems(ids_BL, is_last_BPL, scores_BPL)


def repeated_items(weight_F: Tensor, chosen: Tensor, history: JaggedTensor) -> RepeatedItems:
    """Return how the items in whole histories are scored, with the values in `RepeatScores`.

    Args:
        weight_F: ``RepeatScores.weight``, float32 [7].
        chosen: ``RepeatScores.chosen``, float32 [2].
        history: B bags with item IDs, oldest first.
    """
    items = prefix_items(weight_F, history, history.lengths().long()[:, None])
    sample_N, position_N = items.is_last_BPL[:, 0].nonzero().unbind(1)
    ids_N, additions_N = (
        items.ids_BL[sample_N, position_N],
        items.scores_BPL[sample_N, 0, position_N] + chosen[0],
    )
    return RepeatedItems(sample_N, ids_N, additions_N, weight_F[0] * chosen[1])
