"""TorchRec's policies for managed collisions: which IDs a module keeps, with TorchRec's results.

N IDs of the history, each once; Z IDs that the module has
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Filter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""Maps the counts of IDs to a mask of the IDs to admit, and to the threshold that was used."""


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Admit the IDs whose count is above the mean times the multiplier."""
    threshold = 1 / id_counts.numel() * threshold_skew_multiplier * id_counts.sum()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Admit the IDs whose count is above the mean."""
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Admit an ID with a given probability at each read; torch's generator draws."""
    probability = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float)
    threshold = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - torch.pow(probability, id_counts) > threshold, threshold


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number that a policy keeps for each ID."""

    metadata_name: str
    is_mch_metadata: bool
    """Whether the module stores it for each ID that has a row."""
    is_history_metadata: bool
    """Whether the module stores it for each entry of the history."""


class MCHEvictionPolicy:
    """A policy of `MCHManagedCollisionModule`: it keeps the IDs with the largest scores.

    A policy of your own defines ``scores``, or the three methods that TorchRec's policies define.

    Args:
        metadata_info: the numbers that it keeps: ``counts``, ``last_access_iter``.
        threshold_filtering_func: chooses the IDs of the history to admit; None: all.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: Filter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """The numbers that the policy keeps."""
        return self._metadata_info

    def scores(self, current_iter: int, numbers: dict[str, Tensor]) -> Tensor:
        """Return the scores of IDs from the numbers that the policy keeps for them."""
        raise NotImplementedError(f"{type(self).__name__} has no scores. Write them in a subclass.")

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Record the current iteration for the IDs that arrived."""
        for each in history_metadata.values():
            each[:] = current_iter

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the latest iteration of each ID."""
        found = {}
        for name, history in history_metadata.items():
            if additional_ids is not None:
                history = torch.cat([history, torch.full_like(additional_ids, current_iter)])
            latest = torch.zeros_like(unique_ids_counts).scatter_reduce_(
                0, unique_inverse_mapping, history, reduce="amax", include_self=False
            )
            found[name] = latest if threshold_mask is None else latest[threshold_mask]
        return found

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Update the numbers, and choose the IDs with the largest scores. The last place stays unused."""
        known, at = coalesced_history_mch_matching_elements_mask, coalesced_history_mch_matching_indices
        new, merged = {}, {}
        names = [each.metadata_name for each in self._metadata_info if each.is_mch_metadata]
        for name in names:
            kept = mch_metadata[name]
            if name == "counts":
                incoming = coalesced_history_sorted_unique_ids_counts
                kept[at] += incoming[known]
                kept[mch_size - 1] = torch.iinfo(torch.int64).max
            else:
                incoming = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                kept[at] = incoming[known]
                kept[mch_size - 1] = current_iter
            new[name] = incoming[~known]
            merged[name] = torch.cat([kept, new[name]])
        order = torch.argsort(self.scores(current_iter, merged), descending=True, stable=True)
        best, rest = order[:mch_size], order[mch_size:]
        gone, chosen = rest[rest < mch_size], best[best >= mch_size] - mch_size
        for name in names:
            mch_metadata[name][gone] = new[name][chosen]
        return gone, chosen


_COUNTS = MCHEvictionPolicyMetadataInfo("counts", True, False)
_LAST_ACCESS = MCHEvictionPolicyMetadataInfo("last_access_iter", True, True)


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Keep the IDs that are read most often."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def scores(self, current_iter: int, numbers: dict[str, Tensor]) -> Tensor:
        """Return how often each ID was read: the smallest number goes first."""
        return numbers["counts"]


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Keep the IDs that were read last."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, current_iter: int, numbers: dict[str, Tensor]) -> Tensor:
        """Return the negative distance to the last read, raised to the exponent."""
        return -torch.pow(current_iter - numbers["last_access_iter"] + 1, self._decay_exponent)


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Keep the IDs with the largest counts over the distance to the last read, raised to the exponent."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS, _LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, current_iter: int, numbers: dict[str, Tensor]) -> Tensor:
        """Return counts over distances."""
        distance = torch.pow(current_iter - numbers["last_access_iter"] + 1, self._decay_exponent)
        return torch.div(numbers["counts"], distance)
