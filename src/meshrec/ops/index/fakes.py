"""Output shapes for the index operators (fake kernels), for tracing.

``schemas.inc`` has the signatures. A fake kernel names only the arguments that it needs.
"""

import torch

# The operators must exist before fakes are registered for them.
import meshrec.ops.index.marked  # noqa: F401
import meshrec.ops.index.naive  # noqa: F401
import meshrec.ops.index.slots  # noqa: F401
from meshrec.ops.library import dynamic_size, register_fakes

register_fakes(
    index_mix=lambda ids, *_: torch.empty_like(ids),
    index_order=lambda ids, *_: torch.empty_like(ids),
    index_mix_parts=lambda ids, *_: torch.empty_like(ids),
    index_unique=lambda ids: (ids.new_empty(dynamic_size()), torch.empty_like(ids)),
    index_find=lambda memory, ids, seed: torch.empty_like(ids),
    index_find_parts=lambda memory, seeds, ids, starts, *_: (
        torch.empty_like(ids),
        ids.new_empty(len(starts)),
    ),
    marked_range=lambda values, marks: values.new_empty(3, dtype=torch.int64),
    marked_histogram=lambda values, *options: values.new_empty(options[-1], dtype=torch.int64),
    marked_between=lambda values, *_: values.new_empty(dynamic_size(), dtype=torch.int64),
    fill_slots=lambda *_: None,
    release_slots=lambda pins, alive, slots: (
        torch.empty(dynamic_size(), dtype=torch.int64),
        torch.empty(len(slots), dtype=torch.int64),
    ),
    first_left=lambda scores, slots, *_: [
        *(table_slots.new_empty(dynamic_size()) for table_slots in slots),
        torch.empty(len(slots), dtype=torch.int64),
    ],
)
