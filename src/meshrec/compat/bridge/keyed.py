"""Keyed optimizers with TorchRec's arguments; their state_dict has groups only if ``save_param_groups`` says
so, as there.
"""

from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.compat.bridge.adapted import Adapted
from meshrec.optim import clipping, keyed, warmup


class _AnyKeyed(ABCMeta):
    """What sharded models have counts as a keyed optimizer too."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, keyed.KeyedOptimizer)
        return super().__instancecheck__(instance)


class KeyedOptimizer(keyed.KeyedOptimizer, metaclass=_AnyKeyed):
    """Keeps state by the names of parameters; write a subclass with a ``step``.

    Args:
        params: the parameters by name.
        state: per parameter a dict of its state.
        param_groups: torch's groups.
    """

    _is_root = True

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        super().__init__(params, state, param_groups)  # type: ignore[arg-type]
        _settle(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Creates the state of all trained parameters; leaves zero gradients where there are none."""
        super().init_state(sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        """Called after loading; for subclasses to write."""

    @property
    def updates_in_backward(self) -> bool:
        """Never."""
        return False

    def step(self, closure: Any = None) -> Any:
        """For subclasses to write."""
        raise NotImplementedError(
            f"{type(self).__name__} has no step. Write one, or use KeyedOptimizerWrapper."
        )

    def add_param_group(self, param_group: Any) -> None:
        """For subclasses to write."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot take another group. Name its parameters when it is made."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Lets the subclass step with zero gradients, and undoes all but the creation of state."""
        keyed.create_by_step(self, lambda: self.step(None), names, sparse_names)


class DummyKeyedOptimizer(KeyedOptimizer):
    """A step that does nothing, to try wrappers with."""

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


class KeyedOptimizerWrapper(keyed.KeyedOptimizerWrapper):
    """Any torch optimizer, keyed by names.

    Args:
        params: the parameters by name.
        optim_factory: makes the optimizer from their list, or from the mapping if ``pass_params_dict``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        super().__init__(params, (lambda _: optim_factory(params)) if pass_params_dict else optim_factory)
        _settle(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Creates the state of all trained parameters; leaves zero gradients where there are none."""
        super().init_state(sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        """Called after loading; for subclasses to write."""

    def set_optimizer_step(self, step: int) -> None:
        """Tells the torch optimizer, where it wants to know."""
        _tell([self._optimizer], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tells the torch optimizer, where it wants to know."""
        _tell([self._optimizer], "update_hyper_parameters", params_dict)


class CombinedOptimizer(keyed.CombinedOptimizer):
    """Several keyed optimizers as one."""

    def __init__(self, optims: Iterable[keyed.KeyedOptimizer | tuple[str, keyed.KeyedOptimizer]]) -> None:
        super().__init__(optims)
        _settle(self)

    def _inner(self) -> list[keyed.KeyedOptimizer]:
        return [optimizer for _, optimizer in self.optimizers]

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Lets the optimizers inside create their state."""
        for each in self._inner():
            each.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Called after loading: tells the optimizers inside."""
        _tell(self._inner(), "post_load_state_dict")

    def set_optimizer_step(self, step: int) -> None:
        """Tells the optimizers inside, where they want to know."""
        _tell(self._inner(), "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tells the optimizers inside, where they want to know."""
        _tell(self._inner(), "update_hyper_parameters", params_dict)

    def rebind(self, *args: Any) -> None:
        """Let the optimizer of a sharded module inside go on with tables that have moved."""
        _tell(self._inner(), "rebind", *args)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``, or the one that is not empty."""
        return ".".join(part for part in (opt_key, name) if part)


class _Passing:
    """What TorchRec's optimizers around another pass on to it."""

    _optimizer: keyed.KeyedOptimizer

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Lets the optimizer inside create its state."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Called after loading: tells the optimizer inside."""
        _tell([self._optimizer], "post_load_state_dict")

    def set_optimizer_step(self, step: int) -> None:
        """Tells the optimizer inside, where it wants to know."""
        _tell([self._optimizer], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tells the optimizer inside, where it wants to know."""
        _tell([self._optimizer], "update_hyper_parameters", params_dict)


class OptimizerWrapper(_Passing, keyed.OptimizerWrapper):
    """A keyed optimizer around another; write a subclass with a ``step`` of its own."""

    def __init__(self, optimizer: keyed.KeyedOptimizer) -> None:
        super().__init__(optimizer)
        _settle(self)


class GradientClippingOptimizer(_Passing, clipping.GradientClippingOptimizer):
    """Clips the gradients before each step.

    Args:
        optimizer, clipping, max_gradient, norm_type: as there.
        enable_global_grad_clip, param_to_pgs: must be left out.
        track_grad_norm: whether ``last_total_grad_norm`` is there without NORM clipping too.
    """

    def __init__(
        self,
        optimizer: keyed.KeyedOptimizer,
        clipping: clipping.GradientClipping = clipping.GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Any] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        if enable_global_grad_clip or param_to_pgs:
            raise ValueError(
                "gradients of tables are used up in backward, and those of the dense part are equal on "
                "all ranks: there is no norm over groups of ranks. Leave enable_global_grad_clip and "
                "param_to_pgs out."
            )
        super().__init__(optimizer, clipping, max_gradient or 1.0, norm_type)
        self._max_gradient = max_gradient  # 0 makes all gradients 0
        self._tracks = track_grad_norm
        self._replicate_params = [each for group in self.param_groups for each in group["params"]]
        self._sharded_params: dict[Any, list[Tensor]] = {}
        _settle(self)

    def step(self, closure: Any = None) -> Any:
        """Evaluates the closure, clips, and steps the wrapped optimizer."""
        if any(parameter.is_meta for parameter in self.params.values()):
            self._last_total_grad_norm = None
            return self._optimizer.step(closure)
        if self._tracks and self._clipping is not clipping.GradientClipping.NORM:
            self._last_total_grad_norm, _ = self.compute_total_grad_norm()
        return super().step(closure)

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients together, and the gradients."""
        whole = get_grads(self._replicate_params)
        parts = {groups: get_grads(params) for groups, params in self._sharded_params.items()}
        total = compute_total_norm(whole, parts, self._norm_type, self._max_gradient)
        return total, [grad for grads in (*parts.values(), whole) for grad in grads]

    def clip_grad_norm_(self) -> Tensor:
        """Scales all gradients so that their total norm is at most the limit; returns what it was."""
        total, grads = self.compute_total_grad_norm()
        scale = (self._max_gradient / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return total


def _settle(optimizer: keyed.KeyedOptimizer) -> None:
    """TorchRec's ways: groups are saved if asked for, and loading ends with ``post_load_state_dict``."""
    optimizer.save_param_groups(False)
    optimizer.register_load_state_dict_post_hook(_after_loading)


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    _tell([optimizer], "post_load_state_dict")


def _tell(optimizers: Iterable[torch.optim.Optimizer], method: str, *args: Any) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, method):
            getattr(optimizer, method)(*args)


def _fill_gradients(params: Mapping[str, Tensor], sparse_names: Collection[str]) -> None:
    for name, parameter in params.items():
        if parameter.requires_grad and parameter.grad is None:
            zero = torch.zeros_like(parameter)
            parameter.grad = zero.to_sparse() if name in sparse_names else zero


def get_grads(param_list: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there and not empty."""
    grads = [parameter.grad for parameter in param_list]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads if grad is not None]
    return [grad for grad in local if grad.numel()]


def batch_cal_norm(
    grad_list: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    process_groups: Iterable[dist.ProcessGroup] | None = None,
) -> Tensor:
    """The p-th power of the norm of all tensors, over the groups too; for p = inf the norm itself.

    ``max_norm`` changes nothing.
    """
    is_max = norm_type == torch.inf
    norms = torch.stack([torch.linalg.vector_norm(grad, norm_type) for grad in grad_list])
    total: Tensor = norms.max() if is_max else norms.pow(norm_type).sum()
    for group in process_groups or ():
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total


def compute_total_norm(
    replicate_grads: Sequence[Tensor],
    sharded_grads: Mapping[Any, Sequence[Tensor]],
    norm_type: float = 2.0,
    max_grad_norm: float = 1.0,
) -> Tensor:
    """The norm of what every rank has, and of what each tuple of groups has in parts."""
    parts = [batch_cal_norm(replicate_grads, max_grad_norm, norm_type)] if replicate_grads else []
    parts += [
        batch_cal_norm(grads, max_grad_norm, norm_type, groups) for groups, grads in sharded_grads.items()
    ]
    if not parts:
        return torch.tensor(0.0)
    total = torch.stack(parts)
    return total.max() if norm_type == torch.inf else total.sum().pow(1.0 / norm_type)


class WarmupOptimizer(_Passing, warmup.WarmupOptimizer):
    """Sets the learning rate by stages."""

    def __init__(
        self,
        optimizer: keyed.KeyedOptimizer,
        stages: list[warmup.WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer, stages, lr, lr_param, param_name)
        _settle(self)


_STAGE = ("policy", "max_iters", "value", "lr_scale", "decay_iters", "sgdr_period")


def _stage(*args: Any, **kwargs: Any) -> warmup.WarmupStage:
    """TorchRec's ``WarmupStage(policy, max_iters, value, ...)``."""
    return warmup.WarmupStage(**dict(zip(_STAGE, args, strict=False)), **kwargs)


WarmupStage = Adapted(warmup.WarmupStage, _stage)
