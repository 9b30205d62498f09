"""Translation from an optimizer class and keyword arguments to a fused optimizer spec.

A fused optimizer is applied by a kernel to embedding rows, directly from the gradient of a lookup. A *spec*
(``optimizers.OptimizerSpec``) tells its formula and hyperparameters.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from meshrec.optim.optimizers import SGD, SPECS, Adagrad, Adam, OptimizerSpec


class _Translation(NamedTuple):
    """Spec class that corresponds to a torch optimizer class."""

    spec: type[OptimizerSpec]
    fixed: dict[str, Any]
    """Spec arguments implied by the torch class."""


_TORCH: dict[type[torch.optim.Optimizer], _Translation] = {
    torch.optim.SGD: _Translation(SGD, {}),
    torch.optim.Adagrad: _Translation(Adagrad, {}),
    torch.optim.Adam: _Translation(Adam, {}),
    torch.optim.AdamW: _Translation(Adam, {"decoupled_weight_decay": True}),
}

# These arguments select torch's implementation and do not change the result, so specs ignore them.
_IMPLEMENTATION_HINTS = ("foreach", "fused", "capturable")

# TorchRec's and FBGEMM's argument names, mapped to the spec's field names.
_ALIASES = {"learning_rate": "lr", "eta": "trust_coefficient"}


def from_torch(optimizer_class: type, kwargs: Mapping[str, Any]) -> OptimizerSpec:
    """Return the spec of the fused optimizer that corresponds to ``optimizer_class(params, **kwargs)``.

    Unlike a dense optimizer, a fused optimizer touches only the rows that a batch looks up. Between two
    lookups of a row, Adam's moments do not decay and weight decay is not applied, but the bias correction
    counts all updates. If every batch looks up every row, the results are equal.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam`` or ``AdamW``, with torch's defaults; a
            spec from this package; or a class with a method ``fused_spec(kwargs)``, such as
            ``meshrec.compat.bridge.rowwise_adagrad.RowWiseAdagrad``.
        kwargs: Constructor arguments. ``foreach``, ``fused`` and ``capturable`` are ignored. Specs also
            accept ``learning_rate`` for ``lr``, ``beta1`` and ``beta2`` for ``betas``, and ``eta`` for
            ``trust_coefficient``.

    Raises:
        ValueError: The class has no fused equivalent, or the spec cannot express an argument.

    Example::

        >>> from_torch(torch.optim.Adagrad, {"lr": 0.1}).eps
        1e-10
    """
    # Specs first: they need no translation, only other argument names.
    if optimizer_class in SPECS:
        return _from_spec(optimizer_class, kwargs)
    fused_spec = getattr(optimizer_class, "fused_spec", None)
    if fused_spec is not None:
        spec: OptimizerSpec = fused_spec(kwargs)
        return spec
    if optimizer_class not in _TORCH:
        torch_names = ", ".join(f"torch.optim.{torch_class.__name__}" for torch_class in _TORCH)
        names = ", ".join(spec.__name__ for spec in SPECS)
        raise ValueError(
            f"{getattr(optimizer_class, '__name__', optimizer_class)!s} has no fused form. "
            f"Choose one of {torch_names}, or of meshrec.optim: {names}."
        )
    translation = _TORCH[optimizer_class]
    name = f"torch.optim.{optimizer_class.__name__}"
    # torch's own defaults, so that a change in a torch release is not missed.
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(optimizer_class).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for key in kwargs:
        if key not in defaults:
            raise ValueError(f"{name} has no argument {key!r}, allowed are {sorted(defaults)}.")
    return _translate(name, translation, defaults, kwargs)


def _translate(
    name: str, translation: _Translation, defaults: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    """Build the spec for a torch optimizer class.

    Args:
        defaults: torch's default per argument.
    """
    fields = inspect.signature(translation.spec).parameters
    arguments = dict(translation.fixed)
    for key, default in defaults.items():
        value = kwargs.get(key, default)
        # Arguments that the spec lacks are fine only with torch's default, as then they have no effect.
        if key in fields:
            # setdefault: arguments implied by the class (AdamW's decay) take precedence.
            arguments.setdefault(key, value)
        elif key not in _IMPLEMENTATION_HINTS and value != default:
            raise ValueError(
                f"{name}: {key}={value!r} cannot be fused, only {key}={default!r} can. Leave it out, "
                "or train these parameters with the dense optimizer."
            )
    return _make_spec(translation.spec, arguments)


def _from_spec(spec: type[OptimizerSpec], kwargs: Mapping[str, Any]) -> OptimizerSpec:
    """Build a spec from a spec class, and arguments which may have TorchRec's or FBGEMM's names."""
    fields = inspect.signature(spec).parameters
    arguments: dict[str, Any] = {}
    for key, value in _merge_betas(spec, kwargs).items():
        name = _ALIASES.get(key, key)
        if name not in fields:
            raise ValueError(f"{spec.__name__} has no argument {key!r}, allowed are {sorted(fields)}.")
        # For example "lr" and "learning_rate", which are aliases.
        if name in arguments:
            raise ValueError(f"{spec.__name__}: {name} is given twice, as {key!r} too. Leave one out.")
        arguments[name] = value
    # Specs have no default rate: fused and dense optimizers rarely share a good value.
    if "lr" not in arguments:
        raise ValueError(f"{spec.__name__} needs a learning rate. Add 'lr' to the arguments.")
    return _make_spec(spec, arguments)


def _merge_betas(spec: type[OptimizerSpec], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with FBGEMM's ``beta1`` and ``beta2`` merged into torch's ``betas``."""
    fields = inspect.signature(spec).parameters
    joined = dict(kwargs)
    if "betas" in fields and ("beta1" in kwargs or "beta2" in kwargs):
        if "betas" in kwargs:
            raise ValueError(f"{spec.__name__}: betas is given twice, as beta1 or beta2 too. Leave one out.")
        beta1, beta2 = fields["betas"].default
        joined["betas"] = (joined.pop("beta1", beta1), joined.pop("beta2", beta2))
    return joined


def _make_spec(spec: type[OptimizerSpec], arguments: dict[str, Any]) -> OptimizerSpec:
    """Call the spec class. A list given for ``betas`` is converted to a tuple."""
    # JSON configurations have lists, but specs must be hashable.
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    return spec(**arguments)
