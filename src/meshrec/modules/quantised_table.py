"""Module that holds the rows of a quantised table, as nn.EmbeddingBag and nn.Embedding hold other rows."""

from typing import Any

from torch import Tensor, nn

from meshrec.tables.storage import RowStorage, check_loadable


class QuantisedTable(nn.Module):
    """A quantised table. ``weight`` is uint8 ``[rows, bytes of a row]``, see ``ops.nbit``.

    Its state dict has the codes as ``weight`` (uint8 ``[rows, D * bits / 8]``), and ``weight_qscale`` and
    ``weight_qbias`` (fp16 ``[rows]``). They are views of the rows.

    Args:
        storage: layout of the rows.
        dim: number of values of a row.
        weight: the rows.
    """

    def __init__(self, storage: RowStorage, dim: int, weight: nn.Parameter) -> None:
        super().__init__()
        self._storage, self._dim = storage, dim
        self.weight = weight
        self.register_state_dict_post_hook(_put_parts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Set all values to 0, because quantised rows have no random initialisation."""
        self.weight.data.zero_()

    def parts(self) -> dict[str, Tensor]:
        """Return the parts of the rows by name."""
        names = [part.name for part in self._storage.row_parts]
        return dict(zip(names, self._storage.parts(self.weight.detach(), self._dim), strict=True))

    def extra_repr(self) -> str:
        """Return sizes and bits for printing."""
        return f"{self.weight.shape[0]}, {self._dim}, bits={self._storage.bits}"


def _put_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    assert isinstance(module, QuantisedTable)
    state_dict.update({prefix + name: part for name, part in module.parts().items()})


def _take_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    assert isinstance(module, QuantisedTable)
    name = prefix + "weight"
    found = {own: state_dict.pop(prefix + own) for own in module.parts() if prefix + own in state_dict}
    if "weight" not in found:
        return  # torch says so
    # What torch would load is taken here, all of it or nothing; torch finds the rows as they are.
    state_dict[name] = module.weight.detach()
    parts = module.parts()
    try:
        check_loadable(found["weight"], name, module._storage)
    except ValueError as error:
        error_msgs.append(str(error))
        return
    if missing := [prefix + own for own in parts if own not in found]:
        missing_keys.extend(missing)
        return
    for own, part in parts.items():
        if found[own].shape != part.shape:
            error_msgs.append(
                f"{prefix}{own}: the state dict has shape {list(found[own].shape)}, the table "
                f"{list(part.shape)}. Load it into a model with the same tables, quantised alike."
            )
            return
    for own, part in parts.items():
        part.copy_(found[own])
