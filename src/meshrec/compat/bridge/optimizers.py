"""TorchRec's table optimizers: classes for apply_optimizer_in_backward, and FBGEMM's enums."""

import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum, EnumMeta, unique
from typing import Any, ClassVar

import torch
from torch.optim import SGD as TorchSGD

from meshrec.optim import optimizers as specs
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.optim.torch_optimizers import from_torch

# FBGEMM's defaults for omitted arguments.
_DEFAULTS = {
    "learning_rate": 0.01,
    "eps": 1e-8,
    "momentum": 0.9,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "ar_alpha": 0.0,
    "ema_beta": 0.99,
    "min_shrinkage": 0.1,
}
# Optimizers whose weight decay is always decoupled in FBGEMM. For others, weight_decay_mode decides.
_DECAY_IS_DECOUPLED = (specs.Adam, specs.PartialRowWiseAdam, specs.LAMB, specs.PartialRowWiseLAMB)
# FBGEMM storage and caching options. They do not change results, so they are accepted.
_WITHOUT_EFFECT = (
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "cache_sets",
    "enforce_hbm",
    "multipass_prefetch_config",
    "prefetch_pipeline",
    "record_cache_metrics",
    "stochastic_rounding",
    "gather_uvm_cache_stats",
    "use_uniq_cache_locations_bwd",
)


# FBGEMM accepts these for every optimizer, and ignores them where the formula has no such term.
_IGNORED_WHERE_UNUSED = tuple(name for name in _DEFAULTS if name != "learning_rate")
_logger = logging.getLogger("meshrec")


class _ListedNames(EnumMeta):
    """Metaclass for `EmbOptimType`. If a member does not exist, the error lists all members."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"MeshRec has no fused optimizer {name!r}, only {list(cls.__members__)}. Choose one of these."
        )


@unique
class EmbOptimType(Enum, metaclass=_ListedNames):
    """FBGEMM's optimizer names for ``fused_params["optimizer"]``."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    ROWWISE_RMSPROP_AR = "row_wise_rmsprop_ar"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


@unique
class WeightDecayMode(Enum):
    """FBGEMM's weight decay modes for ``fused_params["weight_decay_mode"]``."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2


# FBGEMM's names. EXACT means that duplicate IDs are added up before the update, as MeshRec always does.
_SPECS: dict[str, type[OptimizerSpec]] = {
    "SGD": specs.SGD,
    "EXACT_SGD": specs.SGD,
    "LAMB": specs.LAMB,
    "ADAM": specs.Adam,
    "EXACT_ADAGRAD": specs.Adagrad,
    "EXACT_ROWWISE_ADAGRAD": specs.RowWiseAdagrad,
    "ROWWISE_ADAGRAD": specs.RowWiseAdagrad,
    "LARS_SGD": specs.LARS,
    "PARTIAL_ROWWISE_ADAM": specs.PartialRowWiseAdam,
    "PARTIAL_ROWWISE_LAMB": specs.PartialRowWiseLAMB,
    "ROWWISE_RMSPROP_AR": specs.RowWiseRMSpropAR,
}


def spec_of(fused_params: Any) -> OptimizerSpec:
    """Return the optimizer that a sharder's ``fused_params`` describe.

    If they do not name an optimizer, return SGD, which is FBGEMM's default.

    Raises:
        ValueError: the optimizer or an argument is not supported.
    """
    if isinstance(fused_params, OptimizerSpec):
        return fused_params
    options = {key: value for key, value in (fused_params or {}).items() if key not in _WITHOUT_EFFECT}
    _check_output(options.pop("output_dtype", None))
    optimizer = options.pop("optimizer", None)
    if optimizer is None:
        return _from_fbgemm(specs.SGD, options)
    if isinstance(optimizer, OptimizerSpec | type):
        return from_torch(optimizer, options) if isinstance(optimizer, type) else optimizer
    # Compared by name: with fbgemm_gpu installed, programs pass fbgemm_gpu's enum.
    name = optimizer.name if isinstance(optimizer, Enum) else str(optimizer)
    if name not in _SPECS:
        raise ValueError(
            f"MeshRec has no fused optimizer {name!r}, only {sorted(_SPECS)}. Choose one of these."
        )
    return _from_fbgemm(_SPECS[name], options)


def _from_fbgemm(spec: type[OptimizerSpec], given: Mapping[str, Any]) -> OptimizerSpec:
    """Construct an optimizer spec from FBGEMM's arguments, such as ``learning_rate`` and ``beta1``."""
    options = dict(given)
    mode = options.pop("weight_decay_mode", None)
    mode = mode.name if isinstance(mode, Enum) else mode
    decay_needs_no_mode = spec in (*_DECAY_IS_DECOUPLED, specs.LARS)
    if options.get("weight_decay") and not decay_needs_no_mode and mode not in ("L2", "DECOUPLE"):
        raise ValueError(
            f"fused_params: weight_decay needs a weight_decay_mode, L2 or DECOUPLE, got {mode!r}. "
            "Without one FBGEMM ignores it."
        )
    # A throwaway instance, to see which fields this formula has.
    template = spec(lr=0.0)
    unused = [name for name in _IGNORED_WHERE_UNUSED if name in options and not _has(template, name)]
    if unused:
        _logger.warning("fused_params: %s has no %s; ignored, as FBGEMM does.", spec.__name__, unused)
    options = {name: value for name, value in options.items() if name not in unused}
    defaults = {name: value for name, value in _DEFAULTS.items() if _has(template, name)}
    if spec in _DECAY_IS_DECOUPLED or mode == "DECOUPLE":
        options["decoupled_weight_decay"] = True
    # TorchRec's classes call it `lr`, FBGEMM `learning_rate`. Only one of both may be passed on.
    if "lr" in options:
        defaults.pop("learning_rate")
    try:
        return from_torch(spec, {**defaults, **options})
    except ValueError as error:
        if "lr" not in given:
            # Name the argument as the program wrote it.
            error = ValueError(re.sub(r"\blr\b", "learning_rate", str(error)))
        raise ValueError(f"fused_params: {error}") from None


def _has(spec: OptimizerSpec, fbgemm_name: str) -> bool:
    """Return whether a spec has the field for an FBGEMM argument."""
    names = {"learning_rate": "lr", "eta": "trust_coefficient", "beta1": "betas", "beta2": "betas"}
    return hasattr(spec, names.get(fbgemm_name, fbgemm_name))


def _check_output(output_dtype: Any) -> None:
    """Raise ValueError if an output dtype other than fp32 is requested."""
    if output_dtype is not None and str(getattr(output_dtype, "name", output_dtype)) != "FP32":
        raise ValueError(
            f"fused_params: output_dtype {output_dtype!r} is not to be had, embeddings have the tables' "
            "type. Choose the tables' data_type, or the sharder's precision for what is sent."
        )


class _TableOnlyOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that only exist as arguments of ``apply_optimizer_in_backward``.

    Fused tables then use the kernel with the same formula. The object itself cannot step.
    """

    spec: ClassVar[type[OptimizerSpec]]

    def __init__(self, params: Iterable[torch.nn.Parameter], **kwargs: Any) -> None:
        super().__init__(params, dict(kwargs))

    @classmethod
    def fused_spec(cls, kwargs: Mapping[str, Any]) -> OptimizerSpec:
        return _from_fbgemm(cls.spec, kwargs)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise ValueError: only fused tables have this optimizer."""
        raise ValueError(
            f"torchrec.optim.{type(self).__name__} only names an optimizer for tables that are sharded "
            "or fused, and these are not. Use one of torch.optim, or shard the module first."
        )


def _for_tables(name: str, spec: type[OptimizerSpec]) -> type[_TableOnlyOptimizer]:
    """Return the class with a TorchRec name for a MeshRec optimizer."""
    decay = ", with decoupled weight decay" if "Adam" in name else ""
    doc = f"``meshrec.optim.{spec.__name__}`` for fused tables{decay}."
    return type(name, (_TableOnlyOptimizer,), {"spec": spec, "__doc__": doc, "__module__": __name__})


SGD = _for_tables("SGD", specs.SGD)
Adagrad = _for_tables("Adagrad", specs.Adagrad)
Adam = _for_tables("Adam", specs.Adam)
LAMB = _for_tables("LAMB", specs.LAMB)
LarsSGD = _for_tables("LarsSGD", specs.LARS)
PartialRowWiseAdam = _for_tables("PartialRowWiseAdam", specs.PartialRowWiseAdam)
PartialRowWiseLAMB = _for_tables("PartialRowWiseLAMB", specs.PartialRowWiseLAMB)


class _SGDWithMomentum(TorchSGD):
    """torch's SGD with momentum. Fused tables ignore the momentum, as FBGEMM does."""

    @classmethod
    def fused_spec(cls, kwargs: Mapping[str, Any]) -> OptimizerSpec:
        """Return the optimizer spec for fused tables."""
        _logger.warning(
            "torch.optim.SGD(momentum=%s): sharded and fused tables are updated without momentum, as FBGEMM "
            "does.",
            kwargs["momentum"],
        )
        plain = {name: value for name, value in kwargs.items() if name != "momentum"}
        return from_torch(torch.optim.SGD, plain)


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Update every parameter in the backward pass, as soon as its gradient exists, like torch's function.

    For sharded and fused tables, the update runs inside the table kernel.

    Args:
        optimizer_class: optimizer class.
        params: parameters to update.
        optimizer_kwargs: optimizer arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's package uses what torch has deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
    if optimizer_class is torch.optim.SGD and optimizer_kwargs.get("momentum"):
        optimizer_class = _SGDWithMomentum
    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
