"""Scores for repeated items: a learned function of how often and how recently a user had an item.

[Note: repeated items]

A next-item model gives an item of the user's history the score ``g t similarity + w f + o``. ``f`` has six
values: 1, the log of the item's count in the history, the log of two counts that decay with age, the log of
its age, and whether it is the last item. Age is the number of later items in the history. ``g`` and ``w`` are
learned. ``g`` starts at 0: then history items are ranked by the user's own counts, and the similarity, which
fits the training histories first, has a part in it only as far as training and validation support it.

Training compares the target with all items of its history, exactly, and with sampled other items. A sample
almost never draws an item of the history, so sampling alone would not tell how many of them are not repeated.
Evaluation, recommendations and packages compute the same values from the same history.

``o`` is 0 and ``t`` is 1 in training. Similarities fit the training data better than other data, so that
items outside the history get too much of the probability, and history items too much of their order from
them. Every evaluation on validation data therefore chooses ``o`` and ``t`` by the ranking. With the largest
``o`` and a ``t`` of 0, history items come first, in the order of ``w f``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.sparse import JaggedTensor

# B samples, L items in the longest history, P prefixes per history, N (sample, item) pairs

_HALF_LIVES = (8.0, 32.0)
"""Number of later items after which an occurrence counts half."""
_WEIGHT_SCALE = 30.0
"""Factor between the parameter and ``w``. Adam moves a parameter by its learning rate per step, and at 1e-3
weights of the size of a log count would take a whole training run.
"""
_CANDIDATES = ((-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.0, 0.25, 0.5, 1.0))
"""Candidate values of ``o``, and of ``t``, in `RepeatScores.choose`."""
_PADDING_ID = -(1 << 63)  # no ID of an item


class PrefixItems(NamedTuple):
    """Distinct items in P prefixes of each of B histories.

    An item is represented by its last position in the prefix: of history [7, 9, 7], prefix 2 has item 7 at
    position 0, and prefix 3 has it at position 2.
    """

    ids_BL: Tensor
    """Padded histories, int64."""
    is_last_BPL: Tensor
    """Whether position l is in prefix p and holds the last occurrence of its item there."""
    scores_BPL: Tensor
    """``w f`` of the item; undefined elsewhere."""


class RepeatedItems(NamedTuple):
    """Scores of history items: pair n has the score ``factor * similarity + additions_N[n]``.

    Attributes:
        sample_N: Sample index, int64.
        ids_N: Item ID, int64; a sample has an item at most once.
        additions_N: Terms added to the scores.
        factor: Factor of all similarities, a scalar.
    """

    sample_N: Tensor
    ids_N: Tensor
    additions_N: Tensor
    factor: Tensor


class RepeatScores(nn.Module):
    """Learned weights ``g`` and ``w``, and selected ``o`` and ``t``, of [Note: repeated items].

    Args:
        num_items: number of items that are ranked.
        max_length: maximum history length.
        device: device of the weights.
    """

    chosen: Tensor  # ``o`` and ``t``, from the last evaluation on validation data

    def __init__(self, num_items: int, max_length: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        # At first, half of the probability is that of the history's items, shared by their recent counts.
        bias = max(math.log(num_items / max_length), 0.0)
        initial = [bias, 0.0, *(1 / len(_HALF_LIVES) for _ in _HALF_LIVES), 0.0, 0.0]
        self.weight = nn.Parameter(
            torch.tensor([0.0, *(value / _WEIGHT_SCALE for value in initial)], device=device)
        )
        self.register_buffer("chosen", torch.tensor([0.0, 1.0], device=device))

    def choose(self, quality: Callable[[], float]) -> None:
        """Select ``o``, then ``t``: hill climbing over `_CANDIDATES` from the current values.

        Args:
            quality: evaluates the model with the values set in ``chosen``; higher is better.
        """
        for number, choices in enumerate(_CANDIDATES):
            # Neighbors of the current value only: every candidate costs an evaluation.
            at = choices.index(float(self.chosen[number]))
            qualities: dict[int, float] = {}
            while True:
                for candidate in range(max(at - 1, 0), min(at + 2, len(choices))):
                    if candidate not in qualities:
                        self.chosen[number] = choices[candidate]
                        qualities[candidate] = quality()
                # The current one wins ties.
                best = max(qualities, key=lambda candidate: (qualities[candidate], candidate == at))
                if best == at:
                    break
                at = best
            self.chosen[number] = choices[at]


def prefix_items(weight_F: Tensor, history: JaggedTensor, stops_BP: Tensor) -> PrefixItems:
    """Return the distinct items of history prefixes, and the terms ``w f`` of their scores.

    Args:
        weight_F: `RepeatScores.weight`: ``g``, then ``w`` divided by the scale; float32 [7].
        history: B bags of item IDs, oldest first.
        stops_BP: prefix lengths, int64.
    """
    ids, lengths_B = history.values().long(), history.lengths().long()
    longest, device = max(int(lengths_B.max()) if len(lengths_B) else 0, 1), ids.device
    position_L = torch.arange(longest, device=device)
    is_item_BL = position_L < lengths_B[:, None]
    index_BL = history.offsets()[:-1].long()[:, None] + position_L
    padded_ids = torch.cat([ids, ids.new_full((1,), _PADDING_ID)])
    ids_BL = padded_ids[torch.where(is_item_BL, index_BL, len(ids))]
    is_equal_BLL = (ids_BL[:, :, None] == ids_BL[:, None, :]) & is_item_BL[:, :, None]
    is_later_BLL = is_equal_BLL & (position_L > position_L[:, None])
    # The next occurrence of the item at l; the maximum where there is none.
    next_BL = torch.where(is_later_BLL.any(2), is_later_BLL.int().argmax(2), torch.iinfo(torch.int64).max)
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
    """Return the scores of all items in whole histories.

    Args:
        weight_F: `RepeatScores.weight`, float32 [7].
        chosen: `RepeatScores.chosen`, float32 [2].
        history: B bags of item IDs, oldest first.
    """
    items = prefix_items(weight_F, history, history.lengths().long()[:, None])
    sample_N, position_N = items.is_last_BPL[:, 0].nonzero().unbind(1)
    ids_N, additions_N = (
        items.ids_BL[sample_N, position_N],
        items.scores_BPL[sample_N, 0, position_N] + chosen[0],
    )
    return RepeatedItems(sample_N, ids_N, additions_N, weight_F[0] * chosen[1])
