"""Translation of an optimizer class and its arguments, as ``apply_optimizer_in_backward`` takes them, to a
spec.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from meshrec.optim.optimizers import SGD, SPECS, Adagrad, Adam, OptimizerSpec


class _Translation(NamedTuple):
    spec: type[OptimizerSpec]
    fixed: dict[str, Any]


_TORCH: dict[type[torch.optim.Optimizer], _Translation] = {
    torch.optim.SGD: _Translation(SGD, {}),
    torch.optim.Adagrad: _Translation(Adagrad, {}),
    torch.optim.Adam: _Translation(Adam, {}),
    torch.optim.AdamW: _Translation(Adam, {"decoupled_weight_decay": True}),
}

# They choose how torch computes the same numbers, so there is nothing to carry over.
_IMPLEMENTATION_HINTS = ("foreach", "fused", "capturable")

# TorchRec's and FBGEMM's words for what a spec calls otherwise.
_SPELLINGS = {"learning_rate": "lr", "eta": "trust_coefficient"}


def from_torch(optimizer_class: type, kwargs: Mapping[str, Any]) -> OptimizerSpec:
    """Return the spec that computes the same as ``optimizer_class(params, **kwargs)``.

    Rows that a batch does not look up are left alone, unlike with the dense optimizer. Adam's moments do not
    fade and weight decay does not act between two lookups of a row, while the step of the bias correction
    counts all updates. If every batch looks up every row, the results are equal. ``foreach``, ``fused`` and
    ``capturable`` choose an implementation in torch, and are ignored.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam`` or ``AdamW``, with their defaults
            (Adagrad's eps is 1e-10); a spec of this package; or a class with a method ``fused_spec(kwargs)``,
            such as ``meshrec.compat.bridge.rowwise_adagrad.RowWiseAdagrad``.
        kwargs: arguments of the class. Specs also take ``learning_rate`` for ``lr``, ``beta1`` and ``beta2``
            for ``betas``, and ``eta`` for ``trust_coefficient``.

    Raises:
        ValueError: the class has no spec, or the spec cannot express an argument.
    """
    if optimizer_class in SPECS:
        return _from_spec(optimizer_class, kwargs)
    own = getattr(optimizer_class, "fused_spec", None)
    if own is not None:
        spec: OptimizerSpec = own(kwargs)
        return spec
    if optimizer_class not in _TORCH:
        torch_names = ", ".join(f"torch.optim.{known.__name__}" for known in _TORCH)
        names = ", ".join(spec.__name__ for spec in SPECS)
        raise ValueError(
            f"{getattr(optimizer_class, '__name__', optimizer_class)!s} has no fused form. "
            f"Choose one of {torch_names}, or of meshrec.optim: {names}."
        )
    translation = _TORCH[optimizer_class]
    name = f"torch.optim.{optimizer_class.__name__}"
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(optimizer_class).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for key in kwargs:
        if key not in defaults:
            raise ValueError(f"{name} has no argument {key!r}, allowed are {sorted(defaults)}.")
    return _translated(name, translation, defaults, kwargs)


def _translated(
    name: str, translation: _Translation, defaults: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    fields = inspect.signature(translation.spec).parameters
    carried = dict(translation.fixed)
    for key, default in defaults.items():
        value = kwargs.get(key, default)
        if key in fields:
            carried.setdefault(key, value)
        elif key not in _IMPLEMENTATION_HINTS and value != default:
            raise ValueError(
                f"{name}: {key}={value!r} cannot be fused, only {key}={default!r} can. Leave it out, "
                "or train these parameters with the dense optimizer."
            )
    return _make(translation.spec, carried)


def _from_spec(spec: type[OptimizerSpec], kwargs: Mapping[str, Any]) -> OptimizerSpec:
    fields = inspect.signature(spec).parameters
    arguments: dict[str, Any] = {}
    for key, value in _joined_betas(spec, kwargs).items():
        name = _SPELLINGS.get(key, key)
        if name not in fields:
            raise ValueError(f"{spec.__name__} has no argument {key!r}, allowed are {sorted(fields)}.")
        if name in arguments:
            raise ValueError(f"{spec.__name__}: {name} is given twice, as {key!r} too. Leave one out.")
        arguments[name] = value
    if "lr" not in arguments:
        raise ValueError(f"{spec.__name__} needs a learning rate. Add 'lr' to the arguments.")
    return _make(spec, arguments)


def _joined_betas(spec: type[OptimizerSpec], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    fields = inspect.signature(spec).parameters
    rest = dict(kwargs)
    if "betas" in fields and ("beta1" in kwargs or "beta2" in kwargs):
        if "betas" in kwargs:
            raise ValueError(f"{spec.__name__}: betas is given twice, as beta1 or beta2 too. Leave one out.")
        beta1, beta2 = fields["betas"].default
        rest["betas"] = (rest.pop("beta1", beta1), rest.pop("beta2", beta2))
    return rest


def _make(spec: type[OptimizerSpec], arguments: dict[str, Any]) -> OptimizerSpec:
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    return spec(**arguments)
