"""How KeyedJaggedTensors are made: of lengths, of offsets, of others, and empty."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.exchange import received
from meshrec.compat.bridge.sparse.jagged import JaggedTensor

if TYPE_CHECKING:  # at run time that module puts its class here, which is made of this one
    from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

torch.fx.wrap("concatenated")
torch.fx.wrap("empty_of_stride")
torch.fx.wrap("empty_on")


class Makers:
    """The functions that make a KeyedJaggedTensor, which TorchScript compiles one by one, after the class."""

    @staticmethod
    def unchecked(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        *,
        stride: int | None = None,
        strides: Any = None,
        length_per_key: list[int] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """A KeyedJaggedTensor of parts that are known to fit; ``strides``: stride_per_key_per_rank."""
        kjt = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        if isinstance(strides, list):
            strides = torch.tensor(strides, dtype=torch.int32).view(len(keys), -1)
        vars(kjt).update(
            _keys=keys,
            _values=values,
            _weights=weights,
            _lengths=lengths,
            _offsets=offsets,
            _stride=stride,
            _stride_per_key_per_rank=strides,
            _stride_per_key=None,
            _length_per_key=length_per_key,
            _offset_per_key=None,
            _lengths_offset_per_key=None,
            _index_per_key=None,
            _jt_dict=None,
            _inverse_indices=inverse_indices,
        )
        return kjt

    @staticmethod
    def _made(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        strides: Tensor | list[list[int]] | None,
        length_per_key: list[int] | None,
        inverse_indices: tuple[list[str], Tensor] | None,
    ) -> "KeyedJaggedTensor":
        # In methods TorchScript knows no defaults, nor this function, of the class that it is compiling.
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=strides,
            stride_per_key=None,
            length_per_key=length_per_key,
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=inverse_indices,
        )

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """From offsets, with everything that is needed on the host read at once; see :meth:`sync`."""
        strides = stride_per_key_per_rank
        return KeyedJaggedTensor._made(
            keys, values, weights, None, offsets, stride, strides, None, inverse_indices
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """From lengths, with everything that is needed on the host read at once; see :meth:`sync`."""
        strides = stride_per_key_per_rank
        return KeyedJaggedTensor._made(
            keys, values, weights, lengths, None, stride, strides, None, inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """The JaggedTensors one after another; they may have different numbers of bags."""
        values: list[Tensor] = []
        weights: list[Tensor] = []
        lengths: list[Tensor] = []
        strides: list[int] = []
        for jt in jt_dict.values():
            values.append(jt.values())
            lengths.append(jt.lengths())
            strides.append(jt.lengths().numel())
            given = jt.weights_or_none()
            if given is not None:
                weights.append(given)
        assert len(weights) in (0, len(values)), "give weights to all keys or none"
        variable: Tensor | None = None
        if max(strides) > min(strides):
            variable = torch.tensor(strides, dtype=torch.int32)[:, None]
        return KeyedJaggedTensor._made(
            list(jt_dict.keys()),
            torch.cat(values),
            torch.cat(weights) if len(weights) > 0 else None,
            torch.cat(lengths),
            None,
            strides[0] if variable is None else None,
            variable,
            None,
            None,
        ).sync()

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The keys of all, one after another."""
        return concatenated(kjt_list)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """No keys and no values, with ``kjt``'s dtypes and batch size; with a device, room for ``kjt``."""
        return empty_of_stride(kjt) if device is None else empty_on(kjt, device)

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """From what the ranks sent; ``recat``: the order of (key, rank) among (rank, key)."""
        values, weights, lengths, strides, stride = received(
            len(keys), tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
        )
        return KeyedJaggedTensor._made(
            keys, values, weights, lengths, None, stride, strides, None, None
        ).sync()


def concatenated(kjts: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
    """``KeyedJaggedTensor.concat``."""
    if len(kjts) == 0:
        raise ValueError("KeyedJaggedTensor.concat: the list is empty; pass at least one")
    keys: list[str] = []
    values: list[Tensor] = []
    weights: list[Tensor] = []
    lengths: list[Tensor] = []
    strides: list[Tensor] = []
    counts: list[int] = []
    are_counted = True
    inverse_keys: list[str] = []
    inverses: list[Tensor] = []
    for kjt in kjts:
        keys += kjt.keys()
        values.append(kjt.values())
        lengths.append(kjt.lengths())
        given, known, inverse = (
            kjt.weights_or_none(),
            kjt.length_per_key_or_none(),
            kjt.inverse_indices_or_none(),
        )
        if given is not None:
            weights.append(given)
        variable = kjt._stride_per_key_per_rank
        if variable is not None:
            strides.append(variable)
        if known is None:
            are_counted = False
        else:
            counts += known
        if inverse is not None:
            inverse_keys += inverse[0]
            inverses.append(inverse[1])
    if len(weights) not in (0, len(kjts)):
        raise ValueError("KeyedJaggedTensor.concat: only some inputs have weights; give them to all or none")
    assert len(strides) in (0, len(kjts)), "only some inputs have strides per key; pass them to all or none"
    assert len(inverses) in (0, len(kjts)), "only some inputs have inverse indices; pass them to all or none"
    stride: int | None = None
    if len(strides) == 0:
        stride = kjts[0].stride()
        for kjt in kjts:
            assert kjt.stride() == stride, "the inputs must have one batch size"
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        weights=torch.cat(weights) if len(weights) > 0 else None,
        lengths=torch.cat(lengths),
        stride=stride,
        stride_per_key_per_rank=torch.cat(strides) if len(strides) > 0 else None,
        length_per_key=counts if are_counted else None,
        inverse_indices=(inverse_keys, torch.cat(inverses)) if len(inverses) > 0 else None,
    )


def empty_of_stride(kjt: "KeyedJaggedTensor") -> "KeyedJaggedTensor":
    """No keys and no values, with the dtypes and batch size of ``kjt``."""
    weights, strides = kjt.weights_or_none(), kjt._stride_per_key_per_rank
    return KeyedJaggedTensor(
        keys=torch.jit.annotate(list[str], []),
        values=torch.empty(0, dtype=kjt.values().dtype, device=kjt.device()),
        weights=None if weights is None else torch.empty(0, dtype=weights.dtype, device=kjt.device()),
        lengths=torch.empty(0, dtype=kjt.lengths().dtype, device=kjt.device()),
        stride=kjt.stride() if strides is None else None,
        stride_per_key_per_rank=strides,
    )


def empty_on(kjt: "KeyedJaggedTensor", device: torch.device) -> "KeyedJaggedTensor":
    """Room for ``kjt`` on a device."""
    weights, lengths, offsets = kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()
    inverse, strides = kjt.inverse_indices_or_none(), kjt._stride_per_key_per_rank
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.empty_like(kjt.values(), device=device),
        weights=None if weights is None else torch.empty_like(weights, device=device),
        lengths=None if lengths is None else torch.empty_like(lengths, device=device),
        offsets=None if offsets is None else torch.empty_like(offsets, device=device),
        stride=kjt.stride() if strides is None else None,
        stride_per_key_per_rank=strides,
        stride_per_key=kjt._stride_per_key,
        length_per_key=kjt.length_per_key_or_none(),
        offset_per_key=kjt.offset_per_key_or_none(),
        inverse_indices=None
        if inverse is None
        else (inverse[0], torch.empty_like(inverse[1], device=device)),
    )
