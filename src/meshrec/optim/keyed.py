"""Optimizers whose state is keyed by parameter names, so that it survives a change of order, groups and
plan.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from meshrec.optim.named_state import NamedGroup, NamedState
from meshrec.optim.slots import check_slots, contents, fill_slots

Closure = Callable[[], float] | None
"""Argument of ``step``: a function that recomputes the loss and gradients, and returns the loss."""


class KeyedOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer whose state_dict is keyed by parameter names.

    To learning-rate schedulers, GradScaler and hooks it is a ``torch.optim.Optimizer``. It keeps the three
    objects that it is given and not copies, so that a wrapper shares them with the wrapped optimizer.

    Args:
        params: the parameters by name.
        state: the state of each parameter, a dict.
        param_groups: torch's groups, each with ``"params"`` and hyperparameters such as ``"lr"``.
        parts: the optimizers that this one consists of, each with the prefix of its names. Their hooks see
            what is loaded.

    Raises:
        ValueError: ``state`` has an entry for something that is not in ``params``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Tensor, Any],
        param_groups: Sequence[dict[str, Any]],
        parts: Sequence[tuple[str, "KeyedOptimizer"]] = (),
    ) -> None:
        # torch's constructor would make groups and state of its own; this makes the rest, such as hooks.
        self.__setstate__({"defaults": {}})
        self.params = params
        # torch declares the types that it makes itself; it and the schedulers only read and iterate.
        self.state = cast(Any, state)
        self.param_groups = cast(Any, param_groups)
        self._saves_param_groups = True
        self._parts = parts
        known = set(params.values())
        strangers = sum(parameter not in known for parameter in state)
        if strangers:
            raise ValueError(
                f"All state keys must be params. {strangers} are not among the {len(params)} parameters: "
                "give every parameter with state a name."
            )

    @property
    @abstractmethod
    def updates_in_backward(self) -> bool:
        """Whether some parameters are updated during backward, so that nothing else sees their gradients."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks this first; it would pass over parameters whose gradients are used up already.
        if self.updates_in_backward:
            raise ValueError(
                "a GradScaler cannot serve tables that are updated in backward: the backward pass has "
                "already applied the scaled gradients to them, before a scaler could be seen, and their "
                "weights are of no use now. Make the model anew, or load a checkpoint. "
                'Fuse with update="on_step".'
            )
        return False

    @abstractmethod
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Update the parameters; return the closure's loss if there is a closure."""

    @abstractmethod
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose ``"params"`` maps names to parameters."""

    @abstractmethod
    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create the state of the named parameters as before their first step, if they have none yet.

        ``sparse_names``: parameters whose gradients are sparse tensors.
        """

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create the state of all trained parameters, which torch would create in the first step."""
        names = [name for name, parameter in self.params.items() if parameter.requires_grad]
        self.create_state(names, sparse_grad_parameter_names or ())

    def save_param_groups(self, save: bool) -> None:
        """Set whether ``state_dict`` contains the groups (the default) or only the state."""
        self._saves_param_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {name: {slot: value}}, "param_groups": [...]}``. Tensors are not copied."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        name_of = {parameter: name for name, parameter in self.params.items()}
        names = [name_of.get(parameter) for group in self.param_groups for parameter in group["params"]]
        state = {name: contents(slots) for name, slots in self._named_state().items()}
        result: dict[str, Any] = {"state": NamedState(state, names)}
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
        """Copy a state_dict of the same parameters into the existing tensors.

        State that torch would create in the first step is created. Groups are loaded if the state_dict has
        them. If anything does not fit, nothing is changed.

        Raises:
            ValueError: names, slots, shapes or groups differ; the message has the first difference of each
                kind.
        """
        if "state" not in state_dict:
            raise ValueError(
                f"an optimizer's state_dict must have the key 'state', got {sorted(state_dict)}."
            )
        state_dict = self._seen_by_hooks(state_dict)
        new_state: Mapping[str, Mapping[str, Any]] = state_dict["state"]
        _check_names(new_state, self.params, "the state_dict", "this optimizer")
        groups = self._matched_groups(state_dict.get("param_groups"))
        present = self._named_state()
        self.create_state([name for name in new_state if name not in present])
        state = self._named_state()
        _check_names(state, new_state, "this optimizer", "the state_dict")
        for name, slots in state.items():
            check_slots(name, slots, new_state[name])
        for name, slots in state.items():
            fill_slots(slots, new_state[name])
        for group, values in groups:
            group.update({key: copy.deepcopy(value) for key, value in values.items() if key != "params"})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        """Return the groups' hyperparameters, and the parameters' names and shapes."""
        name_of = {parameter: name for name, parameter in self.params.items()}
        lines = [
            f"{type(self).__name__} of {len(self.param_groups)} groups and {len(self.params)} parameters"
        ]
        for index, group in enumerate(self.param_groups):
            numbers = ", ".join(f"{key}={value!r}" for key, value in sorted(group.items()) if key != "params")
            lines.append(f"  group {index}: {numbers}")
            lines += [f"    {name_of.get(each, '?')} {list(each.shape)}" for each in group["params"]]
        return "\n".join(lines)

    def _named_state(self) -> dict[str, dict[str, Any]]:
        found = {name: self.state.get(parameter) for name, parameter in self.params.items()}
        return {name: slots for name, slots in found.items() if slots}

    def _seen_by_hooks(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply the load hooks of this optimizer and of its parts to a state_dict."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, cast(Any, state_dict)) or state_dict
        state = dict(state_dict["state"])
        for prefix, part in self._parts:
            own = {name: full for name in part.params if (full := _prefixed(prefix, name)) in state}
            seen = part._seen_by_hooks({"state": {name: state[full] for name, full in own.items()}})
            state.update({_prefixed(prefix, name): slots for name, slots in seen["state"].items()})
        return {**state_dict, "state": state}

    def _matched_groups(
        self, new_groups: Sequence[Mapping[str, Any]] | None
    ) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        if new_groups is None:
            return []
        name_of = {parameter: name for name, parameter in self.params.items()}
        by_names = {frozenset(group["params"]): group for group in new_groups}
        own = {frozenset(_names_in(group, name_of)): group for group in self.param_groups}
        if own.keys() != by_names.keys():
            raise ValueError(
                f"the parameters are grouped as {sorted(map(sorted, own))} here and as "
                f"{sorted(map(sorted, by_names))} in the state_dict. Group them as they were saved, or "
                "delete 'param_groups' from the state_dict."
            )
        return [(group, by_names[names]) for names, group in own.items()]


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any torch optimizer, with its state keyed by names.

    Args:
        params: the parameters by name.
        optim_factory: makes the optimizer from a list of parameters, such as ``lambda p: torch.optim.Adam(p,
            lr=0.1)``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self._optimizer = optim_factory(list(params.values()))
        self._params = dict(params)
        super().__init__(self._params, self._optimizer.state, self._optimizer.param_groups)
        self.defaults = self._optimizer.defaults

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated during backward: never."""
        return False

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Take one step of the torch optimizer."""
        return self._optimizer.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose ``"params"`` maps names to parameters."""
        added = param_group["params"]
        if not isinstance(added, Mapping):
            raise ValueError(
                f"the 'params' of a group must map names to parameters, got a {type(added).__name__}. "
                "Pass dict(module.named_parameters())."
            )
        for name in added:
            if name in self.params:
                raise ValueError(f"there is a parameter named {name!r} already. Names must be unique.")
        self._optimizer.add_param_group({**param_group, "params": list(added.values())})
        self._params.update(added)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Let the optimizer step with zero gradients, and undo everything except the creation of state."""
        create_by_step(self, self._optimizer.step, names, sparse_names)


class CombinedOptimizer(KeyedOptimizer):
    """A live view of several keyed optimizers as one.

    Args:
        optims: optimizers, or pairs of a prefix and an optimizer, whose names become ``prefix.name``.

    Raises:
        ValueError: a name or a parameter appears twice.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
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
                if parameter in owners:
                    raise ValueError(
                        f"{full!r} and {owners[parameter]!r} are the same parameter. "
                        "One optimizer must own it."
                    )
                names.add(full)
                owners[parameter] = full
        views = _AllParams(self._optims), _AllState(self._optims), _AllGroups(self._optims)
        super().__init__(*views, self._optims)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers with their prefixes."""
        return self._optims

    @property
    def updates_in_backward(self) -> bool:
        """Whether one of the optimizers updates parameters during backward."""
        return any(optimizer.updates_in_backward for _, optimizer in self._optims)

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure once, then step every optimizer."""
        loss = evaluated(closure)
        for _, optimizer in self._optims:
            optimizer.step(None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because it is unknown which optimizer takes the group."""
        raise ValueError(
            "a CombinedOptimizer cannot know which optimizer takes the group. Add it to one of them."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Let every optimizer create its part of the state."""
        for prefix, optimizer in self._optims:
            own = {_prefixed(prefix, name): name for name in optimizer.params}
            optimizer.create_state(
                [own[name] for name in names if name in own],
                [own[name] for name in sparse_names if name in own],
            )


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer that calls functions before and after each step.

    Args:
        optimizer: the optimizer to wrap, which shares its parameters, state and groups.
        before_step: called before each step, after the closure, when gradients are complete.
        after_step: called after each step.
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
        """Whether the wrapped optimizer updates parameters during backward."""
        return self._optimizer.updates_in_backward

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure, then step the wrapped optimizer between the two calls."""
        loss = evaluated(closure)
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
    """Create state by a step with zero gradients, and undo everything else that the step did."""
    targets = [optimizer.params[name] for name in names if not optimizer.state.get(optimizer.params[name])]
    if not targets:
        return
    gradients = [(parameter, parameter.grad) for parameter in optimizer.params.values()]
    values = [parameter.detach().clone() for parameter in targets]
    decays = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    for parameter, _ in gradients:
        parameter.grad = None
    for name in names:
        zero = torch.zeros_like(optimizer.params[name])
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
    for parameter in targets:
        slots = optimizer.state.get(parameter, {})
        if isinstance(slots.get("step"), Tensor):
            slots["step"].zero_()
        elif "step" in slots:
            slots["step"] = 0


def evaluated(closure: Closure) -> float | None:
    """Compute the closure's loss with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class _AllParams(Mapping[str, Tensor]):
    """The parameters of several optimizers, with their prefixes."""

    def __init__(self, optims: list[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def __getitem__(self, name: str) -> Tensor:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Tensor]:
        return {
            _prefixed(prefix, name): parameter
            for prefix, optimizer in self._optims
            for name, parameter in optimizer.params.items()
        }


class _AllState(Mapping[Tensor, Any]):
    """The state of several optimizers."""

    def __init__(self, optims: list[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def __getitem__(self, parameter: Tensor) -> Any:
        for _, optimizer in self._optims:
            # Asked first, because torch's defaultdict would answer a plain lookup by creating the entry.
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for _, optimizer in self._optims for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for _, optimizer in self._optims)


class _AllGroups(Sequence[dict[str, Any]]):
    """Concatenation of the groups of several optimizers."""

    def __init__(self, optims: list[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def __getitem__(self, index: Any) -> Any:
        return [group for _, optimizer in self._optims for group in optimizer.param_groups][index]

    def __len__(self) -> int:
        return sum(len(optimizer.param_groups) for _, optimizer in self._optims)


def _names_in(group: Mapping[str, Any], name_of: Mapping[Tensor, str]) -> list[str]:
    """Return the names of a group's parameters. Parameters without a name have nothing to save."""
    return [name_of[parameter] for parameter in group["params"] if parameter in name_of]


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _check_names(names: Iterable[str], known: Collection[str], where: str, other: str) -> None:
    missing = sorted(set(names) - set(known))
    if missing:
        shown = ", ".join(map(repr, missing[:5])) + (" and more" if len(missing) > 5 else "")
        raise ValueError(
            f"{where} has state of {shown}, {other} has not. "
            "Load what the same parameters and optimizer saved."
        )
