"""Optimizers with state dicts keyed by parameter name.

So a saved state still fits if parameters are reordered, regrouped, or sharded by another plan.
"""

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from meshrec.optim.named_state import NamedGroup, NamedState
from meshrec.optim.slots import check_slots, fill_slots, slots_to_save

K = TypeVar("K")
V = TypeVar("V")
Closure = Callable[[], float] | None
"""Argument of ``step``: a function that recomputes the loss and gradients, and returns the loss."""


class KeyedOptimizer(torch.optim.Optimizer, ABC):
    """Base class for optimizers with a state dict keyed by parameter names instead of torch's positions.

    Learning rate schedulers, GradScaler and hooks accept it as a ``torch.optim.Optimizer``. It stores the
    given params, state and groups without a copy, so a wrapper shares them with the wrapped optimizer.

    Args:
        params: Parameters by name.
        state: Optimizer state by parameter; the state is a dict from slot name to value.
        param_groups: Torch's parameter groups, with ``"params"`` and hyperparameters such as ``"lr"``.
        parts: (prefix, optimizer) pairs for the optimizers combined or wrapped by this one. Their load hooks
            also run when this optimizer loads a state dict.

    Raises:
        ValueError: ``state`` has a key not in ``params``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Tensor, Any],
        param_groups: Sequence[dict[str, Any]],
        parts: Sequence[tuple[str, "KeyedOptimizer"]] = (),
    ) -> None:
        # torch's constructor would create new groups and state. __setstate__ creates only the dicts for
        # hooks.
        self.__setstate__({"defaults": {}})
        # Shared with the caller, not copied: CombinedOptimizer passes live views.
        self.params = params
        # torch declares dict and list; it and the schedulers only read and iterate, so live views work.
        self.state = cast(Any, state)
        self.param_groups = cast(Any, param_groups)
        self._saves_param_groups = True  # changed by save_param_groups
        self._parts = parts  # read by load hooks only
        parameters = set(params.values())
        num_unnamed = sum(parameter not in parameters for parameter in state)
        if num_unnamed:
            raise ValueError(
                f"All state keys must be params. {num_unnamed} are not among the {len(params)} parameters: "
                "give every parameter with state a name."
            )

    @property
    @abstractmethod
    def updates_in_backward(self) -> bool:
        """Whether the backward pass updates some parameters, which then have no gradients in ``step``."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return False: this optimizer does not unscale gradients itself. ``GradScaler.step`` reads this.

        Raise ValueError if the backward pass updates tables. The updates have then used scaled gradients
        already.
        """
        # GradScaler.step reads this first. It would skip parameters whose gradients are already consumed.
        if self.updates_in_backward:
            raise ValueError(
                "a GradScaler cannot serve tables that are updated in backward: the backward pass has "
                "already applied the scaled gradients to them, before a scaler could be seen, and their "
                "weights are unusable now. Build the model again, or load a checkpoint. "
                'Fuse with update="on_step".'
            )
        return False

    @abstractmethod
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure if given, then update the parameters with their gradients.

        Returns:
            The loss returned by the closure; None without a closure.
        """

    @abstractmethod
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose ``"params"`` is a dict from names to parameters."""

    @abstractmethod
    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create initial optimizer state for some parameters. Parameters with state keep it.

        Args:
            names: Parameter names.
            sparse_names: Names of parameters with sparse gradients.
        """

    def drop_state(self, names: Collection[str]) -> None:
        """Remove the optimizer state of the parameters with these names. Undoes ``create_state``."""
        for name in names:
            cast(Any, self.state).pop(self.params[name], None)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create initial state for all trained parameters now. torch would create it in the first step.

        Args:
            sparse_grad_parameter_names: Names of parameters with sparse gradients.
        """
        names = [name for name, parameter in self.params.items() if parameter.requires_grad]
        self.create_state(names, sparse_grad_parameter_names or ())

    def save_param_groups(self, save: bool) -> None:
        """Set whether ``state_dict`` includes the parameter groups (the default) or only the state."""
        self._saves_param_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {name: {slot: value}}, "param_groups": [...]}``. Tensors are not copied."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        name_of = {parameter: name for name, parameter in self.params.items()}
        # By position over all groups, as torch.distributed.checkpoint counts parameters.
        names = [name_of.get(parameter) for group in self.param_groups for parameter in group["params"]]
        state = {name: slots_to_save(slots) for name, slots in self._named_state().items()}
        result: dict[str, Any] = {"state": NamedState(state, names)}
        # Names are sorted, because their order differs between plans.
        if self._saves_param_groups:
            result["param_groups"] = [
                NamedGroup(
                    {
                        "params": sorted(_names_in(group, name_of)),
                        **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
                    },
                    names,
                )
                for group in self.param_groups
            ]
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict for the same parameters. Values are copied into the existing tensors.

        State is created first where it does not exist yet. Parameter groups are loaded if the state dict has
        them. On error nothing changes.

        Args:
            state_dict: State dict from a keyed optimizer with the same parameters, in any order.

        Raises:
            ValueError: Names, slots, shapes or groups differ.
        """
        if "state" not in state_dict:
            raise ValueError(
                f"an optimizer's state_dict must have the key 'state', got {sorted(state_dict)}."
            )
        # Hooks first: they may rename or drop entries that the checks would refuse.
        state_dict = self._apply_load_hooks(state_dict)
        new_state: Mapping[str, Mapping[str, Any]] = state_dict["state"]
        _check_names(new_state, self.params, "the state_dict", "this optimizer")
        present = self._named_state()
        # A fresh optimizer has no tensors to copy into.
        created = [name for name in new_state if name not in present]
        self.create_state(created)
        try:
            groups = self._validate(state_dict)
        except ValueError:
            # Undo, so that a failed load leaves no empty state behind.
            self.drop_state(created)
            raise
        # Everything was checked above, before the first value changes.
        # Read again: ``create_state`` may have added tensors.
        for name, slots in self._named_state().items():
            fill_slots(slots, new_state[name])
        for group, values in groups:
            # Parameters are not loaded: groups already hold the right tensors.
            group.update({key: copy.deepcopy(value) for key, value in values.items() if key != "params"})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict fits the present state, without loading it.

        Raises:
            ValueError: Names, slots, shapes or groups differ.
        """
        self._validate(self._apply_load_hooks(state_dict))

    def _validate(self, state_dict: Mapping[str, Any]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Check a state dict, and pair each parameter group with the saved group to load into it.

        Raises:
            ValueError: Names, slots, shapes or groups differ.
        """
        state, new_state = self._named_state(), state_dict["state"]
        _check_names(new_state, self.params, "the state_dict", "this optimizer")
        # Both directions: missing state would silently restart from zero.
        _check_names(state, new_state, "this optimizer", "the state_dict")
        for name, slots in state.items():
            check_slots(name, slots, new_state[name])
        return self._match_groups(state_dict.get("param_groups"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        """List hyperparameters per group, and parameter names and shapes."""
        name_of = {parameter: name for name, parameter in self.params.items()}
        lines = [
            f"{type(self).__name__} of {len(self.param_groups)} groups and {len(self.params)} parameters"
        ]
        for index, group in enumerate(self.param_groups):
            hyperparameters = ", ".join(
                f"{key}={value!r}" for key, value in sorted(group.items()) if key != "params"
            )
            lines.append(f"  group {index}: {hyperparameters}")
            lines += [
                f"    {name_of.get(parameter, '?')} {list(parameter.shape)}" for parameter in group["params"]
            ]
        return "\n".join(lines)

    def _named_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name. Parameters without state are left out."""
        state = {name: self.state.get(parameter) for name, parameter in self.params.items()}
        return {name: slots for name, slots in state.items() if slots}

    def _apply_load_hooks(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run all load pre-hooks, also in combined or wrapped optimizers. Return the resulting state dict."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, cast(Any, state_dict)) or state_dict
        state = dict(state_dict["state"])
        for prefix, part in self._parts:
            # A part's hooks see only its own parameters, under their names without the prefix.
            prefixed = {name: full for name in part.params if (full := _prefixed(prefix, name)) in state}
            hooked = part._apply_load_hooks({"state": {name: state[full] for name, full in prefixed.items()}})
            state.update({_prefixed(prefix, name): slots for name, slots in hooked["state"].items()})
        return {**state_dict, "state": state}

    def _match_groups(
        self, new_groups: Sequence[Mapping[str, Any]] | None
    ) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Pair each parameter group with the saved group for its parameters, or raise ValueError."""
        if new_groups is None:
            return []
        name_of = {parameter: name for name, parameter in self.params.items()}
        new_groups_by_name = {frozenset(group["params"]): group for group in new_groups}
        # Groups are matched by their parameters, because their order may differ after a plan change.
        groups_by_name = {frozenset(_names_in(group, name_of)): group for group in self.param_groups}
        if groups_by_name.keys() != new_groups_by_name.keys():
            raise ValueError(
                f"the parameters are grouped as {sorted(map(sorted, groups_by_name))} here and as "
                f"{sorted(map(sorted, new_groups_by_name))} in the state_dict. Group them as they were "
                "saved, or "
                "delete 'param_groups' from the state_dict."
            )
        return [(group, new_groups_by_name[names]) for names, group in groups_by_name.items()]


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Keyed optimizer built from any torch optimizer.

    Args:
        params: Parameters by name.
        optim_factory: Builds the torch optimizer, given a list of parameters.

    Example::

        >>> params = dict(torch.nn.Linear(2, 1).named_parameters())
        >>> optimizer = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))
        >>> optimizer.init_state()
        >>> sorted(optimizer.state_dict()["state"])
        ['bias', 'weight']
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        # Owned: no other code should step it or change the groups.
        self._optimizer = optim_factory(list(params.values()))
        self._params = dict(params)
        super().__init__(self._params, self._optimizer.state, self._optimizer.param_groups)
        self.defaults = self._optimizer.defaults

    @property
    def updates_in_backward(self) -> bool:
        """False: only fused tables are updated in the backward pass."""
        return False

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Step the torch optimizer."""
        return self._optimizer.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with ``"params"`` given as a dict from names to parameters.

        Raises:
            ValueError: ``"params"`` is not a dict, or a name already exists.
        """
        added = param_group["params"]
        if not isinstance(added, Mapping):
            raise ValueError(
                f"the 'params' of a group must map names to parameters, got a {type(added).__name__}. "
                "Pass dict(module.named_parameters())."
            )
        for name in added:
            if name in self.params:
                raise ValueError(f"there is a parameter named {name!r} already. Names must be unique.")
        # First: torch validates the group, and an error must leave the names unchanged.
        self._optimizer.add_param_group({**param_group, "params": list(added.values())})
        self._params.update(added)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create initial state with a torch step on zero gradients, which does not change the parameters.

        Args:
            names: Parameter names.
            sparse_names: Names of parameters with sparse gradients.
        """
        create_by_step(self, self._optimizer.step, names, sparse_names)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as a single optimizer, which shows their present groups and state.

    Args:
        optims: Optimizers, or (prefix, optimizer) pairs. With a prefix, parameters are called
            ``prefix.name``.

    Raises:
        ValueError: A name or a parameter appears twice.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        # Fixed for this optimizer's lifetime; their params, state and groups may still change.
        self._optims = [("", item) if isinstance(item, KeyedOptimizer) else item for item in optims]
        names: set[str] = set()
        owners: dict[Tensor, str] = {}
        for prefix, optimizer in self._optims:
            for name, parameter in optimizer.params.items():
                full = _prefixed(prefix, name)
                if full in names:
                    raise ValueError(
                        f"two optimizers have a parameter named {full!r}. "
                        "Give one a prefix: (prefix, optimizer)."
                    )
                # A shared parameter would be updated twice per step.
                # Tensors hash by identity, so equal values in different parameters are not a conflict.
                if parameter in owners:
                    raise ValueError(
                        f"{full!r} and {owners[parameter]!r} are the same parameter. "
                        "One optimizer must own it."
                    )
                names.add(full)
                owners[parameter] = full
        # Views, not copies: an optimizer may get new groups or state later.
        groups = LiveGroups([optimizer for _, optimizer in self._optims])
        super().__init__(LiveMapping(self._all_params), _CombinedState(self._optims), groups, self._optims)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The combined optimizers, as (prefix, optimizer) pairs. The prefix may be empty."""
        return self._optims

    @property
    def updates_in_backward(self) -> bool:
        """Whether any combined optimizer updates parameters in the backward pass."""
        return any(optimizer.updates_in_backward for _, optimizer in self._optims)

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure once, then step every optimizer, without a closure."""
        # Once: every call of the closure accumulates gradients.
        loss = run_closure(closure)
        for _, optimizer in self._optims:
            optimizer.step(None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because it is ambiguous which optimizer should get the group.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a CombinedOptimizer cannot know which optimizer takes the group. Add it to one of them."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create initial state in every optimizer, for those of the given parameters that it has.

        Args:
            names: Parameter names with prefixes.
            sparse_names: Names of parameters with sparse gradients.
        """
        for prefix, optimizer in self._optims:
            local_names = {_prefixed(prefix, name): name for name in optimizer.params}
            optimizer.create_state(
                [local_names[name] for name in names if name in local_names],
                [local_names[name] for name in sparse_names if name in local_names],
            )

    def drop_state(self, names: Collection[str]) -> None:
        """Remove state in every optimizer, for those of the given parameters that it has."""
        for prefix, optimizer in self._optims:
            optimizer.drop_state([name for name in optimizer.params if _prefixed(prefix, name) in names])

    def _all_params(self) -> dict[str, Tensor]:
        """Return all optimizers' parameters by name with prefix."""
        return {
            _prefixed(prefix, name): parameter
            for prefix, optimizer in self._optims
            for name, parameter in optimizer.params.items()
        }


class OptimizerWrapper(KeyedOptimizer):
    """Wrapper around a keyed optimizer that calls functions before and after every step.

    Args:
        optimizer: Wrapped optimizer. Parameters, state and groups are shared with it.
        before_step: Called after the closure and before the step, when all gradients are complete.
        after_step: Called after the step.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        *,
        before_step: Callable[[], object] | None = None,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._before_step = before_step
        self._after_step = after_step
        super().__init__(optimizer.params, optimizer.state, optimizer.param_groups, [("", optimizer)])

    @property
    def updates_in_backward(self) -> bool:
        """Whether the wrapped optimizer updates parameters in the backward pass."""
        return self._optimizer.updates_in_backward

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure, ``before_step``, the wrapped optimizer's step, then ``after_step``."""
        # Before ``before_step``, which needs the gradients.
        loss = run_closure(closure)
        if self._before_step is not None:
            self._before_step()
        self._optimizer.step(None)
        if self._after_step is not None:
            self._after_step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self._optimizer.add_param_group(param_group)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create state in the wrapped optimizer."""
        self._optimizer.create_state(names, sparse_names)


def create_by_step(
    optimizer: KeyedOptimizer,
    step: Callable[[], object],
    names: Collection[str],
    sparse_names: Collection[str],
) -> None:
    """Create initial optimizer state by a step with zero gradients, and undo all other effects of this step.

    torch creates state only in ``step``. Weight decay is disabled for the step, because it changes weights
    even with zero gradients.

    Args:
        optimizer: Keyed optimizer with the parameters and state.
        step: Step function of the torch optimizer.
        names: Names of the parameters for which to create state. Parameters with state keep it.
        sparse_names: Names of parameters with sparse gradients.
    """
    new = [name for name in names if not optimizer.state.get(optimizer.params[name])]
    if not new:
        return
    targets = [optimizer.params[name] for name in new]
    # Restored below. Parameters without a gradient are skipped by the step.
    gradients = [(parameter, parameter.grad) for parameter in optimizer.params.values()]
    # Momentum and similar terms can move weights even with zero gradients.
    values = [parameter.detach().clone() for parameter in targets]
    # Saved, changed for the step, and restored even if the step raises.
    decays = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    # torch's step updates every parameter that has a gradient, also those for which no state is requested.
    for parameter, _ in gradients:
        parameter.grad = None
    for name in new:
        zero = torch.zeros_like(optimizer.params[name])
        # torch's sparse optimizers refuse dense gradients.
        optimizer.params[name].grad = zero.to_sparse() if name in sparse_names else zero
    try:
        for group, _ in decays:
            group["weight_decay"] = 0.0
        step()
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter, value in zip(targets, values, strict=True):
            parameter.detach().copy_(value)
    # The step counter must start at 0 again, or the bias correction is off by one.
    for parameter in targets:
        slots = optimizer.state.get(parameter, {})
        if isinstance(slots.get("step"), Tensor):
            slots["step"].zero_()
        elif "step" in slots:
            slots["step"] = 0


def run_closure(closure: Closure) -> float | None:
    """Call a step's closure with gradients enabled, and return the loss. None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class LiveMapping(Mapping[K, V]):
    """Read-only mapping that calls a function at every access, so it always shows the current content.

    Args:
        content: Function returning the current content.
    """

    def __init__(self, content: Callable[[], Mapping[K, V]]) -> None:
        self._content = content

    def __getitem__(self, key: K) -> V:
        return self._content()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())


class _CombinedState(Mapping[Tensor, Any]):
    """Read-only view of several optimizers' state as a single mapping, by parameter. Shows later changes."""

    def __init__(self, optims: list[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def __getitem__(self, parameter: Tensor) -> Any:
        for _, optimizer in self._optims:
            # Test first: state is a defaultdict, and a plain lookup would create an entry.
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for _, optimizer in self._optims for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for _, optimizer in self._optims)


class LiveGroups(Sequence[dict[str, Any]]):
    """Read-only view of several optimizers' parameter groups as a single sequence. Shows later changes.

    Args:
        optimizers: Optimizers with the groups, in the order of the sequence.
    """

    def __init__(self, optimizers: Sequence[KeyedOptimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # No Python call per group: torch's optimizers iterate over the groups in every step.
        return chain.from_iterable(map(operator.attrgetter("param_groups"), self._optimizers))

    def __len__(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self._optimizers)


def _names_in(group: Mapping[str, Any], name_of: Mapping[Tensor, str]) -> list[str]:
    """Return the names of the parameters in a group. Parameters without a name are left out."""
    # For example gradient buffers and signals, which have no state to save.
    return [name_of[parameter] for parameter in group["params"] if parameter in name_of]


def _prefixed(prefix: str, name: str) -> str:
    """Return ``prefix.name``; with an empty prefix, the name alone."""
    return f"{prefix}.{name}" if prefix else name


def _check_names(names: Iterable[str], allowed: Collection[str], source: str, other: str) -> None:
    """Raise ValueError if ``names`` has a name not in ``allowed``."""
    missing = sorted(set(names) - set(allowed))
    if missing:
        examples = ", ".join(map(repr, missing[:5])) + (" and more" if len(missing) > 5 else "")
        raise ValueError(
            f"{source} has state of {examples}, {other} has not. "
            "Load what the same parameters and optimizer saved."
        )
