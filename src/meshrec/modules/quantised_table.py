"""Module that holds the rows of a quantised table, as nn.EmbeddingBag and nn.Embedding hold other rows."""

from collections.abc import Mapping

from torch import Tensor, nn

from meshrec.tables.holder import TableHolder
from meshrec.tables.storage import RowStorage, check_loadable


class QuantisedTable(TableHolder):
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

    def reset_parameters(self) -> None:
        """Set all values to 0, because quantised rows have no random initialisation."""
        self.weight.data.zero_()

    def part_names(self) -> list[str]:
        """Return the names of the parts of a row."""
        return [part.name for part in self._storage.row_parts]

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the rows by name; views, not copies."""
        return dict(zip(self.part_names(), self._storage.parts(self.weight.detach(), self._dim), strict=True))

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the parts of the rows from ``values``: all of them or none.

        Raises:
            ValueError: a part is missing, or its size or type differs.
        """
        check_loadable(values["weight"], prefix + "weight", self._storage)
        parts = self.whole_parts()
        for name, part in parts.items():
            value = values.get(name)
            if value is None:
                raise ValueError(
                    f"{prefix}{name} is missing. Load what the quantised model's state_dict gave."
                )
            if value.shape != part.shape:
                raise ValueError(
                    f"{prefix}{name}: the state dict has shape {list(value.shape)}, the table "
                    f"{list(part.shape)}. Load it into a model with the same tables, quantised alike."
                )
        for name, part in parts.items():
            part.copy_(values[name])

    def extra_repr(self) -> str:
        """Return sizes and bits for printing."""
        return f"{self.weight.shape[0]}, {self._dim}, bits={self._storage.bits}"
