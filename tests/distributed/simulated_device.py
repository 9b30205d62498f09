"""A GPU that is not there: tensors that say they are on a device, while their numbers lie on the CPU.

It is as strict as a GPU. An operation on tensors of both devices fails, a kernel gets no memory of the host,
and a collective takes tensors of the device only, as NCCL does. Everything that reads the device on the host
is counted. Triton kernels run in its interpreter.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from meshrec.comms import collectives
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.ops import attention, jagged, nbit, tbe  # noqa: F401 - the ops must exist
from meshrec.ops import dist as dist_ops
from meshrec.ops.attention import triton as triton_of_attention
from meshrec.ops.dist import triton as triton_of_dist
from meshrec.ops.nbit import triton as triton_of_nbit
from meshrec.ops.tbe import naive as naive_tbe
from meshrec.ops.tbe import triton as triton_of_tbe

_setup_privateuseone_for_python_backend("simulated")
DEVICE = torch.device("simulated", 0)
reads: list[str] = []
"""The operations that read the device on the host, in their order."""

_aten = torch.ops.aten
_READ = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_NAIVE = {
    op: getattr(module, op)
    for module in (dist_ops.naive, naive_tbe, jagged.naive, attention.naive)
    for op in dir(module)
    if hasattr(torch.ops.meshrec, op)
}
_NAIVE["new_buffer"] = lambda like, size: like.new_empty(size)
_TRITON = {
    op.__name__: op
    for module in (triton_of_attention, triton_of_dist, triton_of_tbe, triton_of_nbit)
    for op in module.OPS
}


class Simulated(torch.Tensor):
    """A tensor that is on the device to all who ask."""

    @staticmethod
    def __new__(cls, inner):
        assert type(inner) is torch.Tensor
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def data_ptr(self):
        return self.inner.data_ptr()

    def __repr__(self):
        return f"Simulated({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "meshrec":
            name = func._schema.name.split("::")[1]
            op = {**_NAIVE, **_TRITON}[name]
            with _OnDevice():  # a mode is off while it handles a call, and this op may be in one
                return op(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        host = [each for each in tensors if not isinstance(each, Simulated) and each.dim()]
        target = torch.device(kwargs.get("device") or DEVICE)
        if func in _COPIES:
            to_host = target.type == "cpu" or not isinstance(tensors[0], Simulated)
            if to_host:
                reads.append(str(func))
        elif host:
            raise AssertionError(f"{func} takes tensors of the device and of the host")
        if func in _READ or (func is _aten.index.Tensor and _has_mask(args[1])):
            reads.append(str(func))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with torch._C.DisableTorchFunction():
            inner_args, inner_kwargs = pytree.tree_map_only(
                Simulated, lambda each: each.inner, (args, kwargs)
            )
            found = func(*inner_args, **inner_kwargs)
        if func is _aten._to_copy.default and to_host:
            return found
        same = {id(each.inner): each for each in tensors if isinstance(each, Simulated)}

        def wrapped(each):
            known = each if isinstance(each, Simulated) else same.get(id(each))
            return Simulated(each) if known is None else known

        return pytree.tree_map_only(torch.Tensor, wrapped, found)


def _has_mask(indices):
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _OnDevice(TorchFunctionMode):
    """Makes tensors for the device where one is asked for, and moves those that are sent to it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return _moved(func, args, kwargs)
        if func is torch.Tensor.tolist and isinstance(args[0], Simulated):
            reads.append("tolist")
            return args[0].inner.tolist()
        device = kwargs.get("device")
        given = bool(args) and isinstance(args[0], Simulated)
        if device is None or torch.device(device).type != DEVICE.type or given:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        return Simulated(func(*args, **kwargs))


def _moved(func, args, kwargs):
    tensor, *rest = args
    targets = [each for each in rest if isinstance(each, torch.device | str)]
    target = kwargs.get("device") or (targets[0] if targets else None)
    if target is None or torch.device(target).type != DEVICE.type:
        return func(*args, **kwargs)
    rest = [each for each in rest if not isinstance(each, torch.device | str)]
    kwargs.pop("device", None)
    if not isinstance(tensor, Simulated):
        if not kwargs.get("non_blocking"):
            reads.append("a copy to the device that waits")
        tensor = Simulated(tensor.detach().clone())
    kwargs.pop("non_blocking", None)
    return func(tensor, *rest, **kwargs) if rest or kwargs else tensor


def _launch(call, executor, *args, **kwargs):
    for arg in pytree.tree_leaves(args):
        assert not isinstance(arg, torch.Tensor) or isinstance(arg, Simulated), "a kernel got host memory"
    inner = pytree.tree_map_only(Simulated, lambda each: each.inner, args)
    with torch._C.DisableTorchFunction():
        return call(executor, *inner, **kwargs)


def _in_mode(method):
    """The engine runs the backward pass in threads of its own, where no mode is on."""

    @functools.wraps(method)
    def call(*args):
        with _OnDevice():
            return method(*args)

    return call


def _on_device_only(collective):
    @functools.wraps(collective)
    def call(tensor, *args, **kwargs):
        assert isinstance(tensor, Simulated), "NCCL takes tensors of the device only"
        return collective(tensor, *args, **kwargs)

    return call


@contextlib.contextmanager
def simulated_device():
    """Tensors made for DEVICE inside are simulated, and collectives take them as NCCL would."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__
    with (
        mock.patch.object(GridExecutor, "__call__", lambda *args, **kwargs: _launch(call, *args, **kwargs)),
        mock.patch.object(collectives, "goes_through_cpu", return_value=False),
        mock.patch.object(dist, "all_to_all_single", _on_device_only(dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", _on_device_only(dist.all_reduce)),
        mock.patch.object(collectives, "_all_gather", _on_device_only(collectives._all_gather)),
        mock.patch.object(ShardedTables, "receive_grad", _in_mode(ShardedTables.receive_grad)),
        mock.patch.object(ShardedTables, "send_grad", _in_mode(ShardedTables.send_grad)),
        _OnDevice(),
    ):
        yield reads
