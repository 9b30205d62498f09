"""The parts of hashed rows in memory: floating-point values, or codes with a scale and a bias."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span


class RowForm(Protocol):
    """The form of rows in memory; see ``RowStorage``."""

    @property
    def bits(self) -> int:
        """Bits of a code; 0 for floating-point values."""

    @property
    def row_parts(self) -> Sequence[RowPart]:
        """The parts of a row."""

    def columns(self, dim: int) -> int:
        """Return the width of rows of ``dim`` values in memory."""

    def part_column(self, column: int) -> int:
        """Return the place of a column in the part ``weight``."""

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return the parts of the values, as views of memory."""


def codes_of(form: RowForm, rows: Tensor, dim: int, columns: Span) -> Tensor:
    """Return some columns of rows of codes, with the scale and bias of whole rows.

    Args:
        form: their form.
        rows: whole rows, ``dim`` values each.
        dim: the width of whole rows.
        columns: the columns that are wanted.
    """
    width = columns[1] - columns[0]
    found = rows.new_zeros(len(rows), form.columns(width))
    first, end = map(form.part_column, columns)
    for target, part in zip(form.parts(found, width), form.parts(rows, dim), strict=True):
        target.copy_(part if part.dim() == 1 else part[:, first:end])
    return found


def read_parts(
    memory: Mapping[str, Tensor], slots: Tensor, names: Collection[str], form: RowForm, width: int
) -> dict[str, Tensor]:
    """Return the parts of rows by name, without those that are not in memory."""
    if form.bits:
        rows = memory["weight"].detach()[slots]
        coded = zip(form.row_parts, form.parts(rows, width), strict=True)
        return {part.name: values for part, values in coded if part.name in names}
    return {name: memory[name].detach()[slots] for name in names if name in memory}


def write_parts(
    memory: Mapping[str, Tensor],
    slots: Tensor,
    block: RowBlock,
    form: RowForm,
    rectangle: Rectangle,
) -> None:
    """Write those parts of a block of rows that are in memory."""
    targets = {name: tensor.detach() for name, tensor in memory.items()}
    if form.bits:
        views = form.parts(targets["weight"], rectangle.c1 - rectangle.c0)
        targets = {part.name: view for part, view in zip(form.row_parts, views, strict=True)}
    first, end = (form.part_column(column - rectangle.c0) for column in block.columns)
    for name, values in block.parts.items():
        if (target := targets.get(name)) is not None:
            own = target if target.dim() == 1 else target[:, first:end]
            own[slots] = values.to(target.dtype)


def cut_columns(
    parts: Mapping[str, Tensor], form: RowForm, rectangle: Rectangle, columns: Span
) -> dict[str, Tensor]:
    """Return some columns of the parts of rows."""
    first, end = (form.part_column(column - rectangle.c0) for column in columns)
    return {name: part if part.dim() == 1 else part[:, first:end] for name, part in parts.items()}


def columns_at(places: Span, form: RowForm, rectangle: Rectangle) -> Span:
    """Return the columns of the table that lie in a part of ``weight``."""
    if places == (form.part_column(rectangle.c0), form.part_column(rectangle.c1)):
        return rectangle.columns
    bits = form.bits or 8
    return places[0] * 8 // bits, places[1] * 8 // bits
