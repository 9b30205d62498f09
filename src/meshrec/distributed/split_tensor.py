"""``SplitTensor``: a DTensor for a table whose rectangles (row and column ranges) are on several ranks.

State dicts contain such tensors. DTensor placements can only describe even chunks in one dimension, but a
rank may have any rectangles. Everything which depends on placements is therefore overridden: assembly of the
full tensor (``full_tensor``, ``redistribute``), and the three methods by which torch.distributed.checkpoint
(DCP) requests local pieces. The placement is ``Replicate``, so torch's tools pass and request full tensors,
from which every rank takes its rectangles.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from meshrec.comms.collectives import broadcast
from meshrec.comms.mesh import Axis, group_device
from meshrec.tables.streamed import StreamedPart, is_same_data
from meshrec.tables.table import Rectangle

_aten = torch.ops.aten


class LocalRectangles(Tensor):
    """A tensor with the shape of a whole table, which stores only the values in this rank's rectangles.

    It is the local part of a `SplitTensor`. It supports copying, casting and comparing, but no arithmetic.
    """

    # Values of every rectangle, and the rectangles. Set by ``__new__``, and never changed.
    _parts: list[Tensor]
    _rectangles: list[Rectangle]

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], rectangles: Sequence[Rectangle], like: Tensor, size: Sequence[int]
    ) -> "LocalRectangles":
        """Create the tensor from the values in this rank's rectangles.

        Args:
            parts: values in every rectangle; not copied.
            rectangles: this rank's rectangles.
            like: tensor from which to take the dtype and the device. On a rank without rectangles, ``parts``
                is empty and cannot show them.
            size: shape of the whole table, [rows, columns], or [rows] for optimizer state with a value per
                row.
        """
        tensor: LocalRectangles = Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=like.dtype, device=like.device
        )
        tensor._parts, tensor._rectangles = list(parts), list(rectangles)
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def local_shards(self) -> list[Tensor]:
        """Return the values in every rectangle on this rank.

        For optimizer state with a value per row, rectangles with the same rows have separate, equal values.
        """
        return self._parts

    def local_offsets(self) -> list[tuple[int, ...]]:
        """Return (first row, first column) for every rectangle on this rank, or (first row,) if 1-D."""
        return [rectangle.origin[: self.dim()] for rectangle in self._rectangles]

    def copy_from(self, source: Tensor) -> None:
        """Copy values from a full tensor, or from a tensor with the same rectangles."""
        for part, values in zip(self._parts, self.parts_of(source), strict=True):
            # Copying a tensor to itself is skipped.
            if not is_same_data(part, values):
                part.detach().copy_(values)

    def parts_of(self, source: Tensor) -> Sequence[Tensor]:
        """Return the values of ``source`` in this rank's rectangles.

        Returns:
            Values for every rectangle, as views of ``source``.

        Raises:
            ValueError: the shape or the rectangles differ.
        """
        if source.shape != self.shape:
            raise ValueError(
                f"a table (or its state) of shape {list(self.shape)} cannot take one of shape "
                f"{list(source.shape)}. Load what tables of the same size gave."
            )
        if isinstance(source, LocalRectangles):
            if source._rectangles != self._rectangles:
                raise ValueError(
                    "the state dict holds other rectangles of the table than this plan has on this rank. Let "
                    "torch.distributed.checkpoint load it, which reshards, or give whole tensors "
                    "(full_tensor())."
                )
            return source._parts
        return [region(source, rectangle) for rectangle in self._rectangles]

    def map_parts(self, fn: Callable[[Tensor], Tensor]) -> "LocalRectangles":
        """Return a tensor with the same rectangles, whose values are the results of ``fn``."""
        # An empty tensor shows the dtype and the device of the result, also on a rank without rectangles.
        like = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        return LocalRectangles([fn(part) for part in self._parts], self._rectangles, like, self.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LocalRectangles({_describe(self._rectangles)} of {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and isinstance(args[0], LocalRectangles):
            args[0].copy_from(args[1])
            return args[0]
        # These operations work on every rectangle separately.
        if func in _MAPPED_OPS:
            local, *options = args
            return local.map_parts(lambda part: func(part, *options, **kwargs))
        # ``torch.equal`` compares only the values on this rank.
        if func is _aten.equal.default and all(isinstance(arg, LocalRectangles) for arg in args[:2]):
            one, other = args[:2]
            return one._rectangles == other._rectangles and all(map(torch.equal, one._parts, other._parts))
        raise _unsupported(func)


_MAPPED_OPS = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
)


class SplitTensor(DTensor):
    """The weights or optimizer state of a table which is split over ranks. State dicts contain such tensors.

    ``full_tensor`` returns the whole table on every rank. DCP can save the tensor under one plan, and load it
    in place under another plan. ``copy_`` copies from a full tensor. Arithmetic is not supported.
    """

    # Rectangles of every rank in the mesh. Set by ``of``, and never changed.
    _holders: Sequence[Sequence[Rectangle]]

    @staticmethod
    def of(local: LocalRectangles, holders: Sequence[Sequence[Rectangle]], mesh: DeviceMesh) -> "SplitTensor":
        """Create a split tensor from this rank's values.

        Args:
            local: values in this rank's rectangles.
            holders: rectangles on every rank in the mesh.
            mesh: the ranks, on a single axis.
        """
        # State with a value per row is cut at the same rows on all ranks, because DCP rejects overlapping
        # pieces. An empty table is not cut: no piece would remain, and DCP would drop the tensor.
        if local.dim() == 1 and len(local):
            local, holders = _cut_at_common_rows(local, holders)
        # The strides of a contiguous full tensor, which the wrapper only pretends to be.
        stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
        # torch's tools must not compute local sizes from the placement; Replicate means the full shape
        # everywhere.
        spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(local.shape, stride, local.dtype))
        tensor: SplitTensor = SplitTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        tensor._holders = holders
        return tensor

    @property
    def local(self) -> LocalRectangles:
        """The values in this rank's rectangles."""
        local = self._local_tensor
        assert isinstance(local, LocalRectangles)
        return local

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the values in this rank's rectangles, a `LocalRectangles`."""
        return self.local

    @torch.no_grad()
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole table as a plain tensor on every rank. Collective over the mesh.

        Every rank needs memory for the whole table and for the largest rectangle.

        Args:
            grad_placements: ignored; present because DTensor has it.
        """
        group = self.device_mesh.get_group()
        axis = Axis(size=group.size(), rank=group.rank(), group=group)
        local = self.local
        local_parts = dict(zip(local._rectangles, local._parts, strict=True))
        # On the group's device, because broadcast needs it there.
        whole = torch.empty(self.shape, dtype=self.dtype, device=group_device(group))
        seen: set[tuple[int, ...]] = set()
        # All ranks iterate over all rectangles in the same order, because broadcasts must match.
        for rank, rectangles in enumerate(self._holders):
            for rectangle in rectangles:
                region_bounds = tuple(rectangle[1:] if self.dim() == 2 else rectangle[1:3])
                if region_bounds in seen:
                    continue  # state with a value per row is equal in all column shards
                seen.add(region_bounds)
                target = region(whole, rectangle)
                # Broadcast needs contiguous memory, but a column shard of the table is not contiguous.
                buffer = target if target.is_contiguous() else torch.empty_like(target).contiguous()
                if rank == axis.rank:
                    buffer.copy_(local_parts[rectangle])
                broadcast(buffer, axis, "a whole table", source=rank)
                if buffer is not target:
                    target.copy_(buffer)
        return whole.to(self.device)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_: Any,
    ) -> DTensor:
        """Return an ordinary, replicated DTensor with the whole table. Collective.

        Args:
            device_mesh: ignored; the result has the mesh of this tensor.
            placements: must be ``Replicate``.

        Raises:
            ValueError: ``placements`` contains another placement.
        """
        if not placements or not all(placement.is_replicate() for placement in placements):
            raise ValueError(
                f"a split table can be redistributed to Replicate() only, got {placements}. Where its "
                "rectangles lie is for the plan to say: DistributedModelParallel.reshard."
            )
        whole = self.full_tensor().to(self.device_mesh.device_type)
        return DTensor.from_local(whole, self.device_mesh, [Replicate()], run_check=False)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return a write item for each rectangle on this rank. DCP calls this to plan a save.

        Rectangles with the same offsets share a write item.
        """
        items: dict[tuple[int, ...], WriteItem] = {}
        for chunk, part in zip(self.__create_chunk_list__(), self.local._parts, strict=True):
            if isinstance(part, StreamedPart):
                part.check_saver(fqn)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.shape)
            index = MetadataIndex(fqn, chunk.offsets)
            items.setdefault(tuple(chunk.offsets), WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return list(items.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the offset and size of each rectangle on this rank. DCP reads these chunks on load."""
        return [
            ChunkStorageMetadata(torch.Size(offset), part.shape)
            for offset, part in zip(self.local.local_offsets(), self.local._parts, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a piece, to which DCP writes when loading, and from which it reads when
        saving.

        Args:
            index: offsets of the piece, and its number, which distinguishes pieces with the same offsets.
        """
        offsets, offset = self.local.local_offsets(), tuple(index.offset or ())
        number = index.index
        # The number is only a hint. If it does not match the offsets, search for the offsets.
        if number is None or number >= len(offsets) or offsets[number] != offset:
            number = offsets.index(offset)
        return self.local._parts[number]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ValueError(
            "a table that is split over ranks cannot be pickled: a rank has only its rectangles. Take the "
            "whole with full_tensor(), on every rank (those of a model with torch.distributed.checkpoint."
            "state_dict.get_model_state_dict and StateDictOptions(full_state_dict=True)), or save the model "
            "with meshrec.checkpoint.save."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitTensor":
        # torch up to 2.11 clones in C++, which makes a DTensor.
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        copied: SplitTensor = memo[id(self)]
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SplitTensor({list(self.shape)}, {self.dtype}, here: {_describe(self.local._rectangles)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function on the local rectangles.

        `_SUPPORTED_FUNCTIONS` are handled here, because torch before 2.12 handles them in C++ for DTensors,
        and would not call ``__torch_dispatch__``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _SUPPORTED_FUNCTIONS:
                return func(*args, **kwargs or {})
            # An ordinary tensor cannot be filled, because this rank has only a part of the values.
            if func is Tensor.copy_ and not isinstance(args[0], SplitTensor):
                raise _unsupported(func)
            return _wrap_result(func(*map(_to_plain, args), **kwargs or {}), args[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, SplitTensor):
            raise _unsupported(func)
        return _wrap_result(
            LocalRectangles.__torch_dispatch__(func, types, [*map(_to_plain, args)], kwargs), first
        )


_SUPPORTED_FUNCTIONS = (
    Tensor.copy_,
    *(Tensor.detach, torch.detach),
    *(Tensor.clone, torch.clone),
    *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(torch.empty_like, torch.zeros_like),
    *(Tensor.equal, torch.equal),
)


def _cut_at_common_rows(
    local: LocalRectangles, holders: Sequence[Sequence[Rectangle]]
) -> tuple[LocalRectangles, list[list[Rectangle]]]:
    """Cut values and rectangles at every row where a rectangle on any rank starts or ends."""
    edges = sorted({row for held in holders for rectangle in held for row in (rectangle.r0, rectangle.r1)})

    def bands(of: Rectangle) -> list[Rectangle]:
        """Return the pieces into which all edges cut a rectangle, in row order."""
        inside = edges[bisect_left(edges, of.r0) : bisect_right(edges, of.r1)]
        return [of._replace(r0=first, r1=last) for first, last in pairwise(inside)]

    cut = [
        (band, part[band.r0 - whole.r0 : band.r1 - whole.r0])
        for whole, part in zip(local._rectangles, local._parts, strict=True)
        for band in bands(whole)
    ]
    cut_local = LocalRectangles([part for _, part in cut], [band for band, _ in cut], local, local.shape)
    return cut_local, [[band for rectangle in held for band in bands(rectangle)] for held in holders]


def region(whole: Tensor, rectangle: Rectangle) -> Tensor:
    """Return a full tensor's values inside a rectangle, as a view.

    Args:
        whole: the whole table [rows, columns], or state with a value per row [rows].
        rectangle: row and column range.
    """
    rows = whole[rectangle.r0 : rectangle.r1]
    return rows if whole.dim() == 1 else rows[:, rectangle.c0 : rectangle.c1]


def _to_plain(arg: Any) -> Any:
    """Return ``arg`` for an operation on local rectangles.

    A SplitTensor becomes the local rectangles, and another DTensor the full tensor. Other values are
    unchanged.
    """
    if isinstance(arg, SplitTensor):
        return arg.local
    return arg.full_tensor() if isinstance(arg, DTensor) else arg


def _wrap_result(result: Any, first: Any) -> Any:
    """Convert the result of an operation on local rectangles back to a SplitTensor."""
    if not isinstance(result, LocalRectangles):
        return result
    return first if result is first.local else SplitTensor.of(result, first._holders, first.device_mesh)


def _unsupported(func: object) -> ValueError:
    """Return the error for an operation which split tensors do not support."""
    return ValueError(
        f"{func} is not for a table that is split over ranks: a rank has only its rectangles. Take the whole "
        "with full_tensor(), on every rank."
    )


def _describe(rectangles: Sequence[Rectangle]) -> str:
    """Return the rectangles as a string, such as "[0:10, 0:4]"."""
    return " ".join(f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in rectangles) or "nothing"
