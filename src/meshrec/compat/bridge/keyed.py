"""TorchRec's keyed optimizers, whose state is keyed by parameter name.

As in TorchRec, ``state_dict`` omits param groups until ``save_param_groups(True)`` is called.
"""

import logging
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.optim import clipping, keyed

_logger = logging.getLogger("meshrec")


class _AnyKeyed(ABCMeta):
    """Metaclass that makes the optimizers of MeshRec's sharded models instances of TorchRec's classes."""

    def __instancecheck__(cls, instance: object) -> bool:
        # In the class's own dict, because subclasses inherit the attribute, but test for themselves as usual.
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, keyed.KeyedOptimizer)
        return super().__instancecheck__(instance)


class KeyedOptimizer(keyed.KeyedOptimizer, metaclass=_AnyKeyed):
    """Optimizer with state keyed by parameter name. Subclasses implement ``step``.

    Args:
        params: parameters by name.
        state: state dict per parameter.
        param_groups: torch param groups.
    """

    _is_root = True

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        super().__init__(params, state, param_groups)  # type: ignore[arg-type]
        apply_torchrec_conventions(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        super().init_state(sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        """Do nothing. Subclasses override this hook, which is called after a state dict was loaded."""

    @property
    def updates_in_backward(self) -> bool:
        return False

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no step. Write one, or use KeyedOptimizerWrapper."
        )

    def add_param_group(self, param_group: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} cannot take another group. Name its parameters when it is made."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        keyed.create_by_step(self, lambda: self.step(None), names, sparse_names)


class DummyKeyedOptimizer(KeyedOptimizer):
    """Optimizer with a no-op step, for testing wrappers."""

    def step(self, closure: Any = None) -> Any:
        pass


def _without_parameters(
    optim_factory: Callable[[Any], torch.optim.Optimizer], pass_params_dict: bool
) -> torch.optim.Optimizer:
    """Return an optimizer without any parameters.

    torch's constructors reject an empty parameter list. So the optimizer is constructed with a placeholder,
    which is then removed.
    """
    # Two dimensions, because row-wise optimizers reject other parameters.
    placeholder = torch.nn.Parameter(torch.empty(0, 0))
    optimizer = optim_factory({"": placeholder} if pass_params_dict else [placeholder])
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    return optimizer


class Forwarding:
    """Mixin with the methods that TorchRec's optimizer wrappers forward to the wrapped optimizers."""

    _optimizer: Any

    def _inner(self) -> Sequence[Any]:
        """Return the wrapped optimizers."""
        return [self._optimizer]

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        for optimizer in self._inner():
            optimizer.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Call ``post_load_state_dict`` on every wrapped optimizer, after a state dict was loaded."""
        call_where_defined(self._inner(), "post_load_state_dict")

    def set_optimizer_step(self, step: int) -> None:
        """Call ``set_optimizer_step`` on every wrapped optimizer with this method."""
        call_where_defined(self._inner(), "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Call ``update_hyper_parameters`` on every wrapped optimizer with this method."""
        call_where_defined(self._inner(), "update_hyper_parameters", params_dict)

    def scratch_buffers(self) -> tuple[Tensor, ...]:
        """Return the scratch buffers of all wrapped optimizers with such a method."""
        having = [optimizer for optimizer in self._inner() if hasattr(optimizer, "scratch_buffers")]
        return tuple(buffer for optimizer in having for buffer in optimizer.scratch_buffers())


class KeyedOptimizerWrapper(Forwarding, keyed.KeyedOptimizerWrapper):
    """Torch optimizer with named parameters.

    Without parameters, ``step`` does nothing, and the constructor logs a warning. TorchRec programs wrap the
    tables that have no in-backward optimizer; MeshRec also updates data-parallel tables in backward.

    Args:
        params: parameters by name.
        optim_factory: constructs the optimizer from the parameter list, or from the mapping if
            ``pass_params_dict``.
        pass_params_dict: whether to pass the mapping.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        if not params:
            _logger.warning(
                "KeyedOptimizerWrapper got no parameters, and steps nothing. Tables with an optimizer in "
                "backward are updated in backward, data-parallel ones too."
            )
            # torch optimizers raise an error for an empty parameter list, so one is created around a
            # placeholder.
            super().__init__(params, lambda _: _without_parameters(optim_factory, pass_params_dict))
        else:
            super().__init__(params, (lambda _: optim_factory(params)) if pass_params_dict else optim_factory)
        apply_torchrec_conventions(self)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        # Not super(), which would forward to the torch optimizer.
        keyed.KeyedOptimizerWrapper.init_state(self, sparse_grad_parameter_names)
        _fill_gradients(self.params, sparse_grad_parameter_names or ())

    def post_load_state_dict(self) -> None:
        pass


class CombinedOptimizer(Forwarding, keyed.CombinedOptimizer):
    """Several keyed optimizers that are used as one."""

    def __init__(self, optims: Iterable[keyed.KeyedOptimizer | tuple[str, keyed.KeyedOptimizer]]) -> None:
        super().__init__(optims)
        apply_torchrec_conventions(self)

    def _inner(self) -> Sequence[keyed.KeyedOptimizer]:
        return [optimizer for _, optimizer in self.optimizers]

    def rebind(self, *args: Any) -> None:
        """Rebind a sharded module's optimizer after tables have moved."""
        call_where_defined(self._inner(), "rebind", *args)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return ``opt_key.name``; if either is empty, return the other."""
        return ".".join(part for part in (opt_key, name) if part)


class OptimizerWrapper(Forwarding, keyed.OptimizerWrapper):
    """Base class of keyed optimizers that wrap another keyed optimizer. Subclasses implement ``step``."""

    def __init__(self, optimizer: keyed.KeyedOptimizer) -> None:
        super().__init__(optimizer)
        apply_torchrec_conventions(self)


class GradientClippingOptimizer(Forwarding, clipping.GradientClippingOptimizer):
    """Optimizer wrapper with gradient clipping before every step.

    Args:
        optimizer, clipping, max_gradient, norm_type: as for MeshRec's.
        enable_global_grad_clip, param_to_pgs: must keep their defaults.
        track_grad_norm: whether to compute ``last_total_grad_norm`` without NORM clipping too.
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
        # MeshRec's class rejects a limit of 0.
        super().__init__(optimizer, clipping, max_gradient or 1.0, norm_type)
        self._max_gradient = max_gradient  # 0 makes all gradients 0
        self._tracks = track_grad_norm
        self._replicate_params = [parameter for group in self.param_groups for parameter in group["params"]]
        # Stays empty here: sharded tables consume their gradients in backward.
        self._sharded_params: dict[Any, list[Tensor]] = {}
        apply_torchrec_conventions(self)

    def step(self, closure: Any = None) -> Any:
        # Meta gradients have no values to measure.
        if any(parameter.is_meta for parameter in self.params.values()):
            self._last_total_grad_norm = None
            return self._optimizer.step(closure)
        if self._tracks and self._clipping is not clipping.GradientClipping.NORM:
            self._last_total_grad_norm, _ = self.compute_total_grad_norm()
        return super().step(closure)

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Return the total norm and the list of gradients."""
        whole = get_grads(self._replicate_params)
        parts = {groups: get_grads(params) for groups, params in self._sharded_params.items()}
        total = compute_total_norm(whole, parts, self._norm_type, self._max_gradient)
        return total, [grad for grads in (*parts.values(), whole) for grad in grads]

    def clip_grad_norm_(self) -> Tensor:
        """Scale all gradients to a total norm at most ``max_gradient``. Return the norm before scaling."""
        total, grads = self.compute_total_grad_norm()
        # The same epsilon as torch.nn.utils.clip_grad_norm_.
        scale = (self._max_gradient / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return total


def apply_torchrec_conventions(optimizer: keyed.KeyedOptimizer) -> None:
    """Give an optimizer TorchRec's conventions.

    Param groups are saved on request only, and ``post_load_state_dict`` runs after a state dict was loaded.
    """
    optimizer.save_param_groups(False)
    # A module-level function: a bound method would tie the hook to this object in copies.
    optimizer.register_load_state_dict_post_hook(_after_loading)


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's ``post_load_state_dict``. torch calls this hook after a state dict was loaded."""
    call_where_defined([optimizer], "post_load_state_dict")


def call_where_defined(optimizers: Iterable[torch.optim.Optimizer], method: str, *args: Any) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, method):
            getattr(optimizer, method)(*args)


def _fill_gradients(params: Mapping[str, Tensor], sparse_names: Collection[str]) -> None:
    """Set missing gradients of trainable parameters to zeros: sparse ones for ``sparse_names``."""
    for name, parameter in params.items():
        if parameter.requires_grad and parameter.grad is None:
            # As TorchRec's init_state does: the gradients stay after the call.
            zero = torch.zeros_like(parameter)
            parameter.grad = zero.to_sparse() if name in sparse_names else zero


def get_grads(param_list: Iterable[Tensor]) -> list[Tensor]:
    """Return local gradients, without missing and empty ones."""
    grads = [parameter.grad for parameter in param_list]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads if grad is not None]
    return [grad for grad in local if grad.numel()]


def batch_cal_norm(
    grad_list: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    process_groups: Iterable[dist.ProcessGroup] | None = None,
) -> Tensor:
    """Return the p-norm of all gradients together, to the power p. For p = inf, return the norm itself.

    Args:
        grad_list: gradients. If all are empty, the local result is 0, or -inf for the inf norm.
        max_norm: ignored.
        norm_type: order p.
        process_groups: groups whose ranks combine their results, one group after another.
    """
    is_max = norm_type == torch.inf
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grad_list if grad.numel()]
    device = grad_list[0].device if grad_list else None
    empty = torch.tensor(-torch.inf if is_max else 0.0, device=device)
    total: Tensor = empty
    # Powers of the norms, because these can be added over groups and ranks.
    if norms:
        total = torch.stack(norms).max() if is_max else torch.stack(norms).pow(norm_type).sum()
    for group in process_groups or ():
        if is_max:
            total = clipping.max_over_ranks(total, group)
        else:
            dist.all_reduce(total, group=group)
    return total


def compute_total_norm(
    replicate_grads: Sequence[Tensor],
    sharded_grads: Mapping[Any, Sequence[Tensor]],
    norm_type: float = 2.0,
    max_grad_norm: float = 1.0,
) -> Tensor:
    """Return the total norm of replicated and sharded gradients.

    Args:
        replicate_grads: gradients that every rank holds in full.
        sharded_grads: local gradient shards, keyed by the process groups that hold them.
        norm_type: order p.
        max_grad_norm: ignored.
    """
    parts = [batch_cal_norm(replicate_grads, max_grad_norm, norm_type)] if replicate_grads else []
    parts += [
        batch_cal_norm(grads, max_grad_norm, norm_type, groups) for groups, grads in sharded_grads.items()
    ]
    if not parts:
        return torch.tensor(0.0)
    total = torch.stack(parts)
    return total.max() if norm_type == torch.inf else total.sum().pow(1.0 / norm_type)
