"""DTensor for a split table, from which this rank holds some rectangles.

DTensor placements describe even chunks in a single dimension, but here a rank may hold any rectangles. So
everything that depends on placements is overridden: how the whole is assembled (``full_tensor``,
``redistribute``), and the three methods by which torch.distributed.checkpoint (DCP) requests local pieces.
The placement is ``Replicate``: torch's tools then give and request whole tensors, and every rank takes its
rectangles.
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
from meshrec.tables.streamed import StreamedPart, is_same
from meshrec.tables.table import Rectangle

_aten = torch.ops.aten


class LocalRectangles(Tensor):
    """A table's local rectangles, in the whole table's shape.

    It supports copies from whole tensors and copies of itself, but no other arithmetic.
    """

    _parts: list[Tensor]
    _rectangles: list[Rectangle]

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], rectangles: Sequence[Rectangle], like: Tensor, size: Sequence[int]
    ) -> "LocalRectangles":
        """Create the tensor from this rank's parts.

        Args:
            parts: values by rectangle.
            rectangles: this rank's rectangles.
            like: a tensor with the dtype and device; needed if a rank has no rectangle.
            size: the whole table's size, or 1-D for state with a value per row.
        """
        tensor: LocalRectangles = Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=like.dtype, device=like.device
        )
        tensor._parts, tensor._rectangles = list(parts), list(rectangles)
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def local_shards(self) -> list[Tensor]:
        """Return the parts.

        For per-row state, rectangles with the same rows have separate parts with equal values.
        """
        return self._parts

    def local_offsets(self) -> list[tuple[int, ...]]:
        """Return the part offsets in the whole."""
        return [rectangle.origin[: self.dim()] for rectangle in self._rectangles]

    def copy_from(self, source: Tensor) -> None:
        """Copy from a whole tensor, or from a tensor with the same rectangles; see ``parts_of``."""
        for part, values in zip(self._parts, self.parts_of(source), strict=True):
            if not is_same(part, values):
                part.detach().copy_(values)

    def parts_of(self, source: Tensor) -> Sequence[Tensor]:
        """Return the parts by rectangle from a whole tensor, or from a tensor with the same rectangles.

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

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> "LocalRectangles":
        """Return the same rectangles with ``fn`` applied to the parts."""
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
        if func in _MAPPED:
            local, *options = args
            return local.mapped(lambda part: func(part, *options, **kwargs))
        if func is _aten.equal.default and all(isinstance(arg, LocalRectangles) for arg in args[:2]):
            one, other = args[:2]
            return one._rectangles == other._rectangles and all(map(torch.equal, one._parts, other._parts))
        raise _refusal(func)


_MAPPED = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
)


class SplitTensor(DTensor):
    """A table, or a table state, split by a plan over the ranks in ``mesh``.

    ``full_tensor`` returns the whole on every rank. DCP saves it, and loads into it in place, whatever the
    plan on the other side. ``copy_`` takes whole tensors. Other operations need plain tensors.
    """

    _holders: Sequence[Sequence[Rectangle]]

    @staticmethod
    def of(local: LocalRectangles, holders: Sequence[Sequence[Rectangle]], mesh: DeviceMesh) -> "SplitTensor":
        """Create a split tensor.

        Per-row state is cut at the same rows on all ranks, because DCP does not accept overlapping parts. If
        the table is empty, the parts stay: DCP would drop a tensor without parts.

        Args:
            local: this rank's rectangles.
            holders: rectangles by rank in the mesh.
            mesh: the ranks, on a single axis.
        """
        if local.dim() == 1 and len(local):
            local, holders = _cut_at_common_rows(local, holders)
        stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
        spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(local.shape, stride, local.dtype))
        tensor: SplitTensor = SplitTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        tensor._holders = holders
        return tensor

    @property
    def local(self) -> LocalRectangles:
        """Local rectangles."""
        local = self._local_tensor
        assert isinstance(local, LocalRectangles)
        return local

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the local rectangles."""
        return self.local

    @torch.no_grad()
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole, as a plain tensor, on every rank. Collective over the mesh.

        A rank needs memory for the whole and for the largest rectangle.
        """
        group = self.device_mesh.get_group()
        axis = Axis(size=group.size(), rank=group.rank(), group=group)
        local = self.local
        local_parts = dict(zip(local._rectangles, local._parts, strict=True))
        whole = torch.empty(self.shape, dtype=self.dtype, device=group_device(group))
        seen: set[tuple[int, ...]] = set()
        # All ranks walk all rectangles in the same order, because broadcasts must match.
        for rank, rectangles in enumerate(self._holders):
            for rectangle in rectangles:
                region_bounds = tuple(rectangle[1:] if self.dim() == 2 else rectangle[1:3])
                if region_bounds in seen:
                    continue  # columns in the same rows share per-row state
                seen.add(region_bounds)
                target = region(whole, rectangle)
                # Broadcast needs contiguous memory, which column shards in the whole are not.
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
        """Return an ordinary DTensor with the whole, for ``Replicate`` placements. Collective.

        Raises:
            ValueError: other placements are given.
        """
        if not placements or not all(placement.is_replicate() for placement in placements):
            raise ValueError(
                f"a split table can be redistributed to Replicate() only, got {placements}. Where its "
                "rectangles lie is for the plan to say: DistributedModelParallel.reshard."
            )
        whole = self.full_tensor().to(self.device_mesh.device_type)
        return DTensor.from_local(whole, self.device_mesh, [Replicate()], run_check=False)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return, for DCP, the pieces this rank can write. For per-row state, a row appears once."""
        items: dict[tuple[int, ...], WriteItem] = {}
        for chunk, part in zip(self.__create_chunk_list__(), self.local._parts, strict=True):
            if isinstance(part, StreamedPart):
                part.check_saver(fqn)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.shape)
            index = MetadataIndex(fqn, chunk.offsets)
            items.setdefault(tuple(chunk.offsets), WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return list(items.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return, for DCP, the pieces this rank must read: every part."""
        return [
            ChunkStorageMetadata(torch.Size(offset), part.shape)
            for offset, part in zip(self.local.local_offsets(), self.local._parts, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return, for DCP, a part's memory. The index number distinguishes parts with the same rows."""
        offsets, offset = self.local.local_offsets(), tuple(index.offset or ())
        number = index.index
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
        """Run an operation on the rectangles. Before torch 2.12, C++ handles the listed operations for
        DTensors.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_RECTANGLES:
                return func(*args, **kwargs or {})
            if func is Tensor.copy_ and not isinstance(args[0], SplitTensor):
                raise _refusal(func)
            return _wrapped(func(*map(_plain, args), **kwargs or {}), args[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, SplitTensor):
            raise _refusal(func)
        return _wrapped(LocalRectangles.__torch_dispatch__(func, types, [*map(_plain, args)], kwargs), first)


_OF_RECTANGLES = (
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
    """Cut per-row state and the rectangles wherever any rectangle starts or ends."""
    edges = sorted({row for held in holders for rectangle in held for row in (rectangle.r0, rectangle.r1)})

    def bands(of: Rectangle) -> list[Rectangle]:
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
    """Return a rectangle in the whole's memory; for per-row state, the rows."""
    rows = whole[rectangle.r0 : rectangle.r1]
    return rows if whole.dim() == 1 else rows[:, rectangle.c0 : rectangle.c1]


def _plain(arg: Any) -> Any:
    if isinstance(arg, SplitTensor):
        return arg.local
    return arg.full_tensor() if isinstance(arg, DTensor) else arg


def _wrapped(result: Any, first: Any) -> Any:
    """Wrap the result from an operation on the rectangles in ``first`` as a split tensor."""
    if not isinstance(result, LocalRectangles):
        return result
    return first if result is first.local else SplitTensor.of(result, first._holders, first.device_mesh)


def _refusal(func: object) -> ValueError:
    return ValueError(
        f"{func} is not for a table that is split over ranks: a rank has only its rectangles. Take the whole "
        "with full_tensor(), on every rank."
    )


def _describe(rectangles: Sequence[Rectangle]) -> str:
    return " ".join(f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in rectangles) or "nothing"
