"""The state of one parameter: comparison, saving and filling, slot by slot, with nested dicts."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def contents(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return state to save. Objects that have a state_dict are replaced by it."""
    return {
        slot: contents(value)
        if isinstance(value, dict)
        else value.state_dict()
        if _is_stateful(value)
        else value
        for slot, value in slots.items()
    }


def fill_slots(slots: dict[str, Any], new_slots: Mapping[str, Any]) -> None:
    """Copy state into the existing tensors, dicts and objects."""
    for slot, value in new_slots.items():
        present = slots[slot]
        if value is present:
            continue  # filled in place
        if isinstance(present, dict):
            fill_slots(present, value)
        elif _is_stateful(present):
            present.load_state_dict(value)
        elif hasattr(present, "local_shards"):
            for shard, new_shard in zip(present.local_shards(), value.local_shards(), strict=True):
                shard.tensor.detach().copy_(new_shard.tensor)
        elif isinstance(value, Tensor):
            present.detach().copy_(value)
        else:
            slots[slot] = copy.deepcopy(value)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_slots(name: str, slots: Mapping[str, Any], new_slots: Mapping[str, Any]) -> None:
    """Raise ValueError unless the state of ``name`` can be filled with ``new_slots``."""
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
            continue  # it checks what it loads
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
