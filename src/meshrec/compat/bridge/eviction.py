"""TorchRec's eviction policies for managed collisions, with TorchRec's results.

Shapes: N distinct IDs in the history, Z IDs in the module.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Filter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""Map ID counts [N] to an admission mask [N] and the threshold that was applied."""


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Admit IDs with a count above ``threshold_skew_multiplier`` times the mean count.

    Returns:
        Mask of admitted IDs, and the threshold.
    """
    threshold = 1 / id_counts.numel() * threshold_skew_multiplier * id_counts.sum()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Admit IDs with a count above the mean count.

    Returns:
        Mask of admitted IDs, and the threshold.
    """
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Admit an ID with probability ``per_id_probability`` per occurrence.

    Random numbers come from torch's global generator.

    Returns:
        Mask of admitted IDs, and a random threshold per ID. An ID is admitted if its admission probability is
        above the threshold.
    """
    # 1 - (1 - p) ** count is the probability of admission in any of `count` occurrences.
    probability = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float)
    threshold = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - torch.pow(probability, id_counts) > threshold, threshold


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """Description of a statistic that an eviction policy keeps per ID."""

    metadata_name: str
    is_mch_metadata: bool
    """Whether the module stores the statistic for every ID with a row."""
    is_history_metadata: bool
    """Whether the module stores the statistic for every occurrence of an ID in the history."""


class MCHEvictionPolicy:
    """Eviction policy for `MCHManagedCollisionModule`: keeps the IDs with the highest scores.

    A custom policy implements ``scores``, or overrides the three methods of TorchRec's policies.

    Args:
        metadata_info: descriptions of the statistics that the policy keeps per ID, such as ``counts`` and
            ``last_access_iter``.
        threshold_filtering_func: admission filter for history IDs; None: admit all.
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
        """Descriptions of the statistics that the policy keeps per ID."""
        return self._metadata_info

    def scores(self, current_iter: int, statistics: dict[str, Tensor]) -> Tensor:
        """Return a score per ID, computed from the policy's statistics."""
        raise NotImplementedError(f"{type(self).__name__} has no scores. Write them in a subclass.")

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Record the current iteration for all incoming IDs.

        Args:
            current_iter: training iteration.
            incoming_ids: IDs of the batch, [n].
            history_metadata: statistics by name, int64 [n]. Written in place.
        """
        for statistic in history_metadata.values():
            statistic[:] = current_iter

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Reduce the history to the latest iteration per distinct ID.

        Args:
            current_iter: training iteration.
            history_metadata: statistics by name, per history entry.
            unique_ids_counts: occurrences per distinct ID, [N].
            unique_inverse_mapping: for every history entry, and then for every additional ID, the index of
                its distinct ID.
            additional_ids: IDs of the current iteration that are not in the history; or None.
            threshold_mask: admission mask [N]; None: admit all.

        Returns:
            By statistic name, the latest iteration of every admitted ID.
        """
        coalesced = {}
        for name, history in history_metadata.items():
            # The additional IDs were seen in this iteration, and have no history yet.
            if additional_ids is not None:
                history = torch.cat([history, torch.full_like(additional_ids, current_iter)])
            latest = torch.zeros_like(unique_ids_counts).scatter_reduce_(
                0, unique_inverse_mapping, history, reduce="amax", include_self=False
            )
            coalesced[name] = latest if threshold_mask is None else latest[threshold_mask]
        return coalesced

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
        """Update the statistics, and select the IDs to evict and to admit.

        A slot is an entry in the module's list of IDs, and belongs to a table row. The last slot is never
        evicted, because all IDs without a slot share its row.

        Args:
            current_iter: training iteration.
            mch_size: number of slots Z.
            coalesced_history_argsort_mapping: permutation that sorts the distinct history IDs by
                descending count, [N].
            coalesced_history_sorted_unique_ids_counts: occurrences of these IDs in the sorted order, [N].
            coalesced_history_mch_matching_elements_mask: for every ID in this order, whether it has a slot,
                bool [N].
            coalesced_history_mch_matching_indices: slots of the IDs with a slot.
            mch_metadata: statistics by name, with an entry per slot, [Z]. Updated in place.
            coalesced_history_metadata: result of ``coalesce_history_metadata``.

        Returns:
            Slots whose IDs are evicted, and the IDs that replace them. A replacement is given as an index
            among the history IDs without a slot. Both tensors have the same length.
        """
        is_present = coalesced_history_mch_matching_elements_mask
        slots = coalesced_history_mch_matching_indices
        new, merged = {}, {}
        names = [info.metadata_name for info in self._metadata_info if info.is_mch_metadata]
        for name in names:
            resident = mch_metadata[name]
            if name == "counts":
                incoming = coalesced_history_sorted_unique_ids_counts
                resident[slots] += incoming[is_present]
                # The last slot is the shared row. The maximum keeps it from ever being evicted.
                resident[mch_size - 1] = torch.iinfo(torch.int64).max
            else:
                incoming = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                resident[slots] = incoming[is_present]
                # The shared row counts as read now, so it has the highest score of an LRU policy as well.
                resident[mch_size - 1] = current_iter
            new[name] = incoming[~is_present]
            merged[name] = torch.cat([resident, new[name]])
        # Stable, so that resident IDs win ties against new IDs. TorchRec's results depend on this.
        order = torch.argsort(self.scores(current_iter, merged), descending=True, stable=True)
        best, remaining = order[:mch_size], order[mch_size:]
        # Both have the same length: every new ID among the best pushes a resident ID out.
        evicted, admitted = remaining[remaining < mch_size], best[best >= mch_size] - mch_size
        for name in names:
            mch_metadata[name][evicted] = new[name][admitted]
        return evicted, admitted


# The names are parts of buffer names (`_mch_counts`), so checkpoints contain them.
_COUNTS = MCHEvictionPolicyMetadataInfo("counts", True, False)
_LAST_ACCESS = MCHEvictionPolicyMetadataInfo("last_access_iter", True, True)


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Eviction policy that keeps the IDs that were read most often."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def scores(self, current_iter: int, statistics: dict[str, Tensor]) -> Tensor:
        return statistics["counts"]


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Eviction policy that keeps the IDs that were read most recently."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, current_iter: int, statistics: dict[str, Tensor]) -> Tensor:
        """Return the negative distance to the last read, to the power ``decay_exponent``."""
        return -torch.pow(current_iter - statistics["last_access_iter"] + 1, self._decay_exponent)


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Eviction policy that keeps the IDs with the highest ratio of reads to time since the last read.

    The score is ``count / (iterations since the last read) ** decay_exponent``.
    """

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS, _LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, current_iter: int, statistics: dict[str, Tensor]) -> Tensor:
        """Return count / distance ** decay_exponent."""
        distance = torch.pow(current_iter - statistics["last_access_iter"] + 1, self._decay_exponent)
        return torch.div(statistics["counts"], distance)
