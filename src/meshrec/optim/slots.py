"""Functions that save, check and load the optimizer state of a single parameter.

The state is a dict from *slot* name, such as ``exp_avg`` in ``torch.optim.Adam``, to a tensor, an object with
a state dict, or a nested dict.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def slots_to_save(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state in the form in which it is saved.

    Objects with a ``state_dict`` method are replaced by their state dicts, also inside nested dicts. Tensors
    are not copied.
    """
    return {
        slot: slots_to_save(value)
        if isinstance(value, dict)
        else value.state_dict()
        if _is_stateful(value)
        else value
        for slot, value in slots.items()
    }


def fill_slots(slots: dict[str, Any], new_slots: Mapping[str, Any]) -> None:
    """Load saved optimizer state into a parameter's existing state. Call `check_slots` before.

    Tensors, dicts and objects with a state dict are filled in place. Other values are replaced by copies.
    """
    for slot, value in new_slots.items():
        present = slots[slot]
        if value is present:
            # The checkpoint reader has already filled this tensor in place.
            continue
        if isinstance(present, dict):
            fill_slots(present, value)
        elif _is_stateful(present):
            present.load_state_dict(value)
        # ShardedTensor does not implement copy_.
        elif hasattr(present, "local_shards"):
            for shard, new_shard in zip(present.local_shards(), value.local_shards(), strict=True):
                shard.tensor.detach().copy_(new_shard.tensor)
        # In place: wrappers and fused tables share this tensor.
        elif isinstance(value, Tensor):
            present.detach().copy_(value)
        else:
            slots[slot] = copy.deepcopy(value)


def _is_stateful(value: Any) -> bool:
    """Return whether an object has the methods ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_slots(name: str, slots: Mapping[str, Any], new_slots: Mapping[str, Any]) -> None:
    """Check that saved optimizer state fits a parameter's existing state, without loading it.

    Args:
        name: Parameter name in messages.
        slots: Existing state.
        new_slots: Saved state, in the form returned by `slots_to_save`.

    Raises:
        ValueError: Slots, types or shapes differ.
    """
    # Another optimizer class has other slots, even if shapes agree.
    if slots.keys() != new_slots.keys():
        raise ValueError(
            f"the state of {name!r} is {sorted(slots)} here and {sorted(new_slots)} in the state_dict. "
            "Load what the same kind of optimizer saved."
        )
    for slot, value in slots.items():
        new_value = new_slots[slot]
        if isinstance(value, dict) and isinstance(new_value, Mapping):
            check_slots(f"{name}.{slot}", value, new_value)
            continue
        if _is_stateful(value):
            # The object's own load_state_dict checks the value.
            continue
        if isinstance(value, Tensor) != isinstance(new_value, Tensor):
            raise ValueError(
                f"{slot!r} of {name!r} is a {type(value).__name__} here and a {type(new_value).__name__} "
                "in the state_dict. Load what the same kind of optimizer saved."
            )
        if isinstance(value, Tensor) and value.shape != new_value.shape:
            raise ValueError(
                f"{slot!r} of {name!r} has shape {list(value.shape)} here and {list(new_value.shape)} in the "
                "state_dict. The parameter must have the size it was saved with."
            )
