"""Keyed optimizers with TorchRec's arguments. As there, state_dict has groups only after
``save_param_groups``.
"""

from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.optim import clipping, keyed


class _AnyKeyed(ABCMeta):
    """A metaclass that counts the optimizers of sharded models as keyed optimizers."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, keyed.KeyedOptimizer)
        return super().__instancecheck__(instance)


class KeyedOptimizer(keyed.KeyedOptimizer, metaclass=_AnyKeyed):
    """An optimizer that stores state by the names of parameters. Subclasses write ``step``.

    Args:
        params: the parameters by name.
        state: a dict of state for each parameter.
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
        settle(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create the state of all trained parameters. Missing gradients become zeros."""
        super().init_state(sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        """Do nothing; subclasses may override what happens after loading."""

    @property
    def updates_in_backward(self) -> bool:
        """False: the optimizer never updates in the backward pass."""
        return False

    def step(self, closure: Any = None) -> Any:
        """Raise NotImplementedError, because subclasses write it."""
        raise NotImplementedError(
            f"{type(self).__name__} has no step. Write one, or use KeyedOptimizerWrapper."
        )

    def add_param_group(self, param_group: Any) -> None:
        """Raise NotImplementedError, because subclasses write it."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot take another group. Name its parameters when it is made."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Let the subclass step with zero gradients, and undo everything but the creation of state."""
        keyed.create_by_step(self, lambda: self.step(None), names, sparse_names)


class DummyKeyedOptimizer(KeyedOptimizer):
    """An optimizer whose step does nothing, for trying wrappers."""

    def step(self, closure: Any = None) -> Any:
        """Leave the parameters as they are; ``closure`` is not called."""


class KeyedOptimizerWrapper(keyed.KeyedOptimizerWrapper):
    """A torch optimizer with names for its parameters.

    Args:
        params: the parameters by name.
        optim_factory: makes the optimizer from the list of parameters, or from the mapping if
            ``pass_params_dict``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        super().__init__(params, (lambda _: optim_factory(params)) if pass_params_dict else optim_factory)
        settle(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create the state of all trained parameters. Missing gradients become zeros."""
        super().init_state(sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        """Do nothing; subclasses may override what happens after loading."""

    def set_optimizer_step(self, step: int) -> None:
        """Pass the step to the torch optimizer if it has this method."""
        tell([self._optimizer], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass the values to the torch optimizer if it has this method."""
        tell([self._optimizer], "update_hyper_parameters", params_dict)


class CombinedOptimizer(keyed.CombinedOptimizer):
    """Several keyed optimizers as one."""

    def __init__(self, optims: Iterable[keyed.KeyedOptimizer | tuple[str, keyed.KeyedOptimizer]]) -> None:
        super().__init__(optims)
        settle(self)

    def _inner(self) -> list[keyed.KeyedOptimizer]:
        return [optimizer for _, optimizer in self.optimizers]

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create the state of the inner optimizers."""
        for each in self._inner():
            each.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Call the method of the inner optimizers after loading."""
        tell(self._inner(), "post_load_state_dict")

    def set_optimizer_step(self, step: int) -> None:
        """Pass the step to the inner optimizers that have this method."""
        tell(self._inner(), "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass the values to the inner optimizers that have this method."""
        tell(self._inner(), "update_hyper_parameters", params_dict)

    def rebind(self, *args: Any) -> None:
        """Let the optimizer of a sharded module continue with tables that have moved."""
        tell(self._inner(), "rebind", *args)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return ``opt_key.name``, or the one that is not empty."""
        return ".".join(part for part in (opt_key, name) if part)


class Passing:
    """The methods that TorchRec's wrappers pass on to the optimizer inside."""

    _optimizer: keyed.KeyedOptimizer

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Create the state of the inner optimizer."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Call the method of the inner optimizer after loading."""
        tell([self._optimizer], "post_load_state_dict")

    def set_optimizer_step(self, step: int) -> None:
        """Pass the step to the inner optimizer if it has this method."""
        tell([self._optimizer], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass the values to the inner optimizer if it has this method."""
        tell([self._optimizer], "update_hyper_parameters", params_dict)


class OptimizerWrapper(Passing, keyed.OptimizerWrapper):
    """A keyed optimizer around another. Subclasses write their own ``step``."""

    def __init__(self, optimizer: keyed.KeyedOptimizer) -> None:
        super().__init__(optimizer)
        settle(self)


class GradientClippingOptimizer(Passing, clipping.GradientClippingOptimizer):
    """A wrapper that clips the gradients before each step.

    Args:
        optimizer, clipping, max_gradient, norm_type: as for MeshRec's.
        enable_global_grad_clip, param_to_pgs: must be left out.
        track_grad_norm: compute ``last_total_grad_norm`` even without NORM clipping.
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
        settle(self)

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure, clip, and step the wrapped optimizer."""
        if any(parameter.is_meta for parameter in self.params.values()):
            self._last_total_grad_norm = None
            return self._optimizer.step(closure)
        if self._tracks and self._clipping is not clipping.GradientClipping.NORM:
            self._last_total_grad_norm, _ = self.compute_total_grad_norm()
        return super().step(closure)

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Return the norm of all gradients together, and the gradients."""
        whole = get_grads(self._replicate_params)
        parts = {groups: get_grads(params) for groups, params in self._sharded_params.items()}
        total = compute_total_norm(whole, parts, self._norm_type, self._max_gradient)
        return total, [grad for grads in (*parts.values(), whole) for grad in grads]

    def clip_grad_norm_(self) -> Tensor:
        """Scale all gradients so that their total norm is at most the limit; return the norm before."""
        total, grads = self.compute_total_grad_norm()
        scale = (self._max_gradient / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return total


def settle(optimizer: keyed.KeyedOptimizer) -> None:
    """Apply TorchRec's conventions: groups are saved only on request, and loading ends with
    ``post_load_state_dict``.
    """
    optimizer.save_param_groups(False)
    optimizer.register_load_state_dict_post_hook(_after_loading)


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    tell([optimizer], "post_load_state_dict")


def tell(optimizers: Iterable[torch.optim.Optimizer], method: str, *args: Any) -> None:
    """Call a method of the optimizers that have it."""
    for optimizer in optimizers:
        if hasattr(optimizer, method):
            getattr(optimizer, method)(*args)


def _fill_gradients(params: Mapping[str, Tensor], sparse_names: Collection[str]) -> None:
    for name, parameter in params.items():
        if parameter.requires_grad and parameter.grad is None:
            zero = torch.zeros_like(parameter)
            parameter.grad = zero.to_sparse() if name in sparse_names else zero


def get_grads(param_list: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist and are not empty."""
    grads = [parameter.grad for parameter in param_list]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads if grad is not None]
    return [grad for grad in local if grad.numel()]


def batch_cal_norm(
    grad_list: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    process_groups: Iterable[dist.ProcessGroup] | None = None,
) -> Tensor:
    """Return the p-th power of the norm of all tensors, also over the groups; for p = inf, the norm itself.

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
    """Return the total norm of gradients that every rank holds whole, and of those that groups of ranks hold
    in parts.
    """
    parts = [batch_cal_norm(replicate_grads, max_grad_norm, norm_type)] if replicate_grads else []
    parts += [
        batch_cal_norm(grads, max_grad_norm, norm_type, groups) for groups, grads in sharded_grads.items()
    ]
    if not parts:
        return torch.tensor(0.0)
    total = torch.stack(parts)
    return total.max() if norm_type == torch.inf else total.sum().pow(1.0 / norm_type)
