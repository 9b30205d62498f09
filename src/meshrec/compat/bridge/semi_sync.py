"""TorchRec's SemisyncOptimizer: local steps with periodic global steps across all workers."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.compat.bridge.keyed import Forwarding, KeyedOptimizer
from meshrec.optim.keyed import LiveGroups, LiveMapping

# TorchRec's keys in the optimizer's state dict, so that checkpoints have equal names.
SEMI_SYNC_GLOBAL_OPTIM_KEY = "semi_sync_global_optim"
SEMI_SYNC_LOCAL_OPTIM_KEY = "semi_sync_local_optim"
SEMI_SYNC_GLOBAL_STATE_KEY = "semi_sync_global_"
SEMI_SYNC_LOCAL_STATE_KEY = "semi_sync_local_"
SEMISYNC_GLOBAL_STEP_COUNTER_KEY = "__semisync_global_step_counter__"
SEMISYNC_LOCAL_STEP_COUNTER_KEY = "__semisync_local_step_counter__"

_log = logging.getLogger("meshrec")


class SemisyncOptimizer(Forwarding, KeyedOptimizer):
    """Local optimizer for every step, and global optimizer for every ``num_local_steps``-th step.

    A parameter's state holds prefixed slots from both optimizers, and the step counters.

    Args:
        global_params: parameters, or param groups, for the global optimizer.
        optimizer: local optimizer.
        global_optimizer: wrapper with an inner ``_optimizer`` that has a method
            ``global_step(local_step_counter, closure)``.
        num_local_steps: local steps between global steps.
        semi_sync_worker_shard_group, offload_global_model, non_blocking: stored for the global optimizer.

    Raises:
        IndexError: ``global_params`` is empty.
        ValueError: ``num_local_steps`` is below 1, or a name refers to different parameters in the
            optimizers.
    """

    def __init__(
        self,
        global_params: Any,
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: dist.ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        listed = list(global_params)
        if not listed:
            raise IndexError("global_params is empty. Pass the parameters that the global optimizer steps.")
        if num_local_steps < 1:
            raise ValueError(f"num_local_steps is {num_local_steps}. It must be at least 1.")
        in_groups = isinstance(listed[0], Mapping)
        self._worker_model_params = [p for g in listed for p in g["params"]] if in_groups else listed
        self._optimizer, self._global_optimizer = optimizer, global_optimizer
        self._num_local_steps = num_local_steps
        self._worker_shard_group = semi_sync_worker_shard_group
        self._offload_global_model, self._non_blocking = offload_global_model, non_blocking
        # Advanced by step(), and saved as state of every parameter of the global optimizer.
        self._local_step_counter = torch.tensor(0)
        self._global_step_counter = torch.tensor(0)
        # Views, because the inner optimizers create state later, and loading may replace their dicts.
        groups = LiveGroups(self._inner())
        super().__init__(LiveMapping(self._all_params), LiveMapping(self._all_state), groups)
        self.defaults = {"_save_param_groups": False}

    def step(self, closure: Any = None) -> Any:
        self._local_step_counter += 1
        loss: Any = self._optimizer.step(closure)
        # The counter is saved, so resumed training steps globally at the same steps.
        if self._local_step_counter % self._num_local_steps == 0:
            self._global_step_counter += 1
            self._global_optimizer.zero_grad()
            inside: Any = self._global_optimizer
            inside._optimizer.global_step(self._local_step_counter, closure)
            steps = int(self._global_step_counter), int(self._local_step_counter)
            _log.info("global step %d, after %d local steps", *steps)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients in both optimizers."""
        for optimizer in self._inner():
            optimizer.zero_grad(set_to_none=set_to_none)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        KeyedOptimizer.init_state(self, sparse_grad_parameter_names)

    @property
    def updates_in_backward(self) -> bool:
        return any(optimizer.updates_in_backward for optimizer in self._inner())

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        self.defaults["_save_param_groups"] = save
        for optimizer in self._inner():
            optimizer.save_param_groups(save)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        for optimizer in self._inner():
            optimizer.create_state(
                [name for name in names if name in optimizer.params],
                [name for name in sparse_names if name in optimizer.params],
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict into both optimizers and the step counters.

        Raises:
            ValueError: the state dict does not match. Nothing is changed.
        """
        saved = state_dict.get("state", {})
        for prefix, optimizer in zip(_PREFIXES, self._inner(), strict=True):
            names = [name for name, slots in saved.items() if any(slot.startswith(prefix) for slot in slots)]
            # Before loading: it only copies into slots that exist.
            optimizer.create_state([name for name in names if name in optimizer.params])
        super().load_state_dict(state_dict)

    def __repr__(self) -> str:
        return (
            f"{SEMI_SYNC_LOCAL_OPTIM_KEY}: {self._optimizer!r}, "
            f"{SEMI_SYNC_GLOBAL_OPTIM_KEY}: {self._global_optimizer!r}"
        )

    @staticmethod
    def _extract_prefixed_state(param_state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the state slots with a name prefix, without the prefix."""
        return {
            slot.removeprefix(prefix): value for slot, value in param_state.items() if slot.startswith(prefix)
        }

    def _match_groups(self, new_groups: Sequence[Mapping[str, Any]] | None) -> Any:
        # Matched separately, because both optimizers may have groups with the same parameters.
        if new_groups is None:
            return []
        count = len(self._optimizer.param_groups)
        parts = zip(self._inner(), (new_groups[:count], new_groups[count:]), strict=True)
        return [pair for optimizer, groups in parts for pair in optimizer._match_groups(groups)]

    def _inner(self) -> tuple[KeyedOptimizer, KeyedOptimizer]:
        return self._optimizer, self._global_optimizer

    def _all_params(self) -> dict[str, Tensor]:
        """Return the parameters of both optimizers and the step counters, by name."""
        params = dict(self._optimizer.params)
        for name, parameter in self._global_optimizer.params.items():
            if params.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"the local and the global optimizer have different parameters named {name!r}. Give both "
                    "the same one, or other names."
                )
        params[SEMISYNC_GLOBAL_STEP_COUNTER_KEY] = self._global_step_counter
        params[SEMISYNC_LOCAL_STEP_COUNTER_KEY] = self._local_step_counter
        return params

    def _all_state(self) -> dict[Tensor, "_Slots"]:
        """Return the state of every parameter, with the slots of both optimizers under prefixed names.

        Parameters of the global optimizer also get both step counters.
        """
        state: dict[Tensor, _Slots] = {}
        for prefix, optimizer in zip(_PREFIXES, self._inner(), strict=True):
            for parameter, slots in optimizer.state.items():
                state.setdefault(parameter, _Slots()).take(prefix, slots)
        counts = {
            SEMISYNC_GLOBAL_STEP_COUNTER_KEY: self._global_step_counter,
            SEMISYNC_LOCAL_STEP_COUNTER_KEY: self._local_step_counter,
        }
        # Checkpoints store state by parameter, so the counters accompany the global optimizer's parameters.
        for parameter in self._global_optimizer.state:
            state[parameter].take("", counts)
        return state


_PREFIXES = (SEMI_SYNC_LOCAL_STATE_KEY, SEMI_SYNC_GLOBAL_STATE_KEY)


class _Slots(dict[str, Any]):
    """State of one parameter, merged from the state dicts of both optimizers.

    A slot is an entry of the state, such as ``exp_avg``. Assigning a slot also changes the dict from which
    the slot came.
    """

    def __init__(self) -> None:
        super().__init__()
        # The state dict and the slot name behind every prefixed name, so that writes reach the optimizer that
        # owns the slot.
        self._owners: dict[str, tuple[Any, str]] = {}

    def take(self, prefix: str, slots: Any) -> None:
        """Add all slots of an optimizer's state dict, with a prefix before their names."""
        for slot, value in slots.items():
            self._owners[prefix + slot] = slots, slot
            super().__setitem__(prefix + slot, value)

    def __setitem__(self, slot: str, value: Any) -> None:
        slots, source_slot = self._owners[slot]
        slots[source_slot] = value
        super().__setitem__(slot, value)
