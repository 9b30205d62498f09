"""Rewrite an exported program so that values which several samples share are computed once.

A program with ``group`` [B] repeats the R shared rows with ``x.index_select(0, group)`` where the model joins
them with sample rows. The model knows nothing about sharing, so it computes with repeated rows from there
on. This rewrite follows the graph. For every value, it tracks which columns depend only on the shared row,
and which on the sample (`SharedColumns`). Then

- layers over shared columns run on the R shared rows, and their result is repeated;
- a linear layer over both column kinds becomes a sum of two layers:
  ``x W = per_sample W_per_sample + (shared W_shared)[group]``;
- dot products of two shared vectors are computed on the R shared rows.

The rewrite changes the summation order, so results are equal up to rounding.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

# B samples, R shared rows, C columns, D vector width

_aten = torch.ops.aten
_SELECT = _aten.index_select.default
_LINEAR = _aten.linear.default
_DOTS = torch.ops.meshrec.dot_interaction.default
# Operators that do not change values, except perhaps the dtype.
_UNCHANGED = {_aten.alias.default, _aten.detach.default, _aten.to.dtype, _aten.to.device}
# Operators that are elementwise in their first argument.
_ELEMENTWISE = {
    _aten.relu.default,
    _aten.gelu.default,
    _aten.silu.default,
    _aten.sigmoid.default,
    _aten.tanh.default,
    _aten.dropout.default,
}
_BINARY = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor}
# Operators that compute every result row from the same row in the first argument.
_ROWWISE = {_LINEAR, _aten.layer_norm.default}
_SPLITS = {_aten.split_with_sizes.default, _aten.split.Tensor, _aten.chunk.default}
_SHAPES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.flatten.using_ints,
    _aten.unsqueeze.default,
}
# Fraction of shared columns from which a linear layer is split. Below it, the additional sum takes more time
# than the split saves.
_MIN_SHARED = 0.2


class SharedColumns(NamedTuple):
    """Two nodes which together have all columns of a value, [B, C] or [B, C, D].

    A shared column has the same entries for all samples with the same shared row, so it is computed once per
    shared row. All other columns are computed per sample.

    Attributes:
        per_sample: node with a row per sample, [B, ...]; None if all columns are shared.
        shared: node with a row per shared row, [R, ...]; None if no column is shared.
        sources: for every column, (True, index) if it is a column of ``shared``, or (False, index) if it is a
            column of ``per_sample``.
    """

    per_sample: Node | None
    shared: Node | None
    sources: tuple[tuple[bool, int], ...]

    def of(self, is_shared: bool) -> list[int]:
        """Return the indices of the shared columns, or of the per-sample columns if not `is_shared`."""
        return [column for column, (kind, _) in enumerate(self.sources) if kind is is_shared]


def compute_once(graph: Graph, group: Node) -> None:
    """Rewrite a graph so that values which depend only on shared rows are computed once per shared row.

    Args:
        graph: graph of an exported program; changed in place.
        group: input node with the index of every sample's shared row, int64 [B].
    """
    _Sharing(graph, group).run()


class _Sharing:
    """The rewrite of a graph; see the module docstring."""

    def __init__(self, graph: Graph, group: Node) -> None:
        self._graph, self._group = graph, group
        # Columns of every group-dependent value, filled in graph order.
        self._columns_of: dict[Node, SharedColumns] = {}
        # Nodes created or replaced by the rewrite. Those without users are erased at the end.
        self._touched: set[Node] = set()
        # Node being rewritten. New nodes are inserted before it, and get its metadata.
        self._current: Node = group

    def run(self) -> None:
        """Rewrite all nodes in graph order, then erase those that are no longer used."""
        for node in list(self._graph.nodes):
            rule = self._find_rule(node)
            if rule is None:
                continue
            self._current = node
            with self._graph.inserting_before(node), torch.no_grad():
                if node.target is _LINEAR and (split := self._split_linear(node)) is not None:
                    self._replace(node, split)
                    continue
                columns = rule(node)
                if columns is None:
                    continue
                # Everything here is shared: compute it on R rows, and repeat the result for later users.
                if columns.per_sample is None and node.target is not _SELECT:
                    rows = self._select_columns(columns, True)
                    late = self._call(_SELECT, rows, 0, self._group)
                    self._replace(node, late)
                    self._columns_of[late] = columns
                self._columns_of[node] = columns
                self._touched.add(node)
        # In reverse order, so that the users of a node are erased first.
        for node in reversed(list(self._graph.nodes)):
            if node in self._touched and not node.users:
                self._graph.erase_node(node)

    def _find_rule(self, node: Node) -> "Callable[[Node], SharedColumns | None] | None":
        """Return the method which determines the shared columns of a node; None if all are per sample.

        The method returns None if it cannot follow shared columns through the node.
        """
        if node.op != "call_function":
            return None
        if node.target is _SELECT:
            return self._repeated
        if node.target is operator.getitem:
            return self._split_part
        if not any(argument in self._columns_of for argument in node.all_input_nodes):
            return None
        for targets, rule in (
            ({_aten.cat.default}, self._concatenated),
            ({_aten.slice.Tensor}, self._slice),
            (_SHAPES, self._reshaped),
            (_ELEMENTWISE, self._elementwise),
            (_ROWWISE, self._rowwise),
            (_BINARY, self._binary),
            ({_DOTS}, self._dot_products),
        ):
            if node.target in targets:
                return rule
        return None

    # The following rules return the columns of a node; None if they cannot be determined.

    def _repeated(self, node: Node) -> SharedColumns | None:
        """Handle ``x.index_select(0, group)``, with which the model repeats shared rows.

        All columns of the result are shared.
        """
        rows, dim, index = node.args
        if dim != 0 or _unaliased_node(index) is not self._group or len(_shape(rows)) not in (2, 3):
            return None
        assert isinstance(rows, Node)
        return SharedColumns(None, rows, tuple((True, column) for column in range(_shape(rows)[1])))

    def _concatenated(self, node: Node) -> SharedColumns | None:
        """Handle a concatenation by columns: concatenate shared and per-sample columns separately."""
        given: Any = node.args[0]
        dims = len(_shape(node))
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        if dim % dims != 1 or dims > 3:
            return None
        nodes: dict[bool, list[Node]] = {False: [], True: []}
        widths = {False: 0, True: 0}
        sources: list[tuple[bool, int]] = []
        for columns in map(self._columns, given):
            # Columns that earlier inputs of the concatenation have taken.
            starts = dict(widths)
            for is_shared, source in ((False, columns.per_sample), (True, columns.shared)):
                if source is not None:
                    nodes[is_shared].append(source)
                    widths[is_shared] += _shape(source)[1]
            sources += [(is_shared, starts[is_shared] + column) for is_shared, column in columns.sources]
        per_sample, shared = (self._cat(columns) if columns else None for columns in nodes.values())
        return SharedColumns(per_sample, shared, tuple(sources))

    def _slice(self, node: Node) -> SharedColumns | None:
        """Handle a slice of columns with step 1. Return None for other dimensions and steps."""
        source, dim, *span = node.args
        width = len(self._columns(source).sources)
        if dim != 1 or (len(span) > 2 and span[2] != 1):
            return None
        return self._between(source, *slice(*span).indices(width)[:2])

    def _split_part(self, node: Node) -> SharedColumns | None:
        """Handle ``getitem``, which takes one part from a split by columns. Return None for other inputs."""
        split: Any = node.args[0]
        if split.target not in _SPLITS or split.args[0] not in self._columns_of:
            return None
        if len(split.args) < 3 or split.args[2] % len(_shape(split.args[0])) != 1:
            return None
        # Index of the part that this node takes from the split.
        number: Any = node.args[1]
        widths = [part.shape[1] for part in split.meta["val"]]
        return self._between(split.args[0], sum(widths[:number]), sum(widths[: number + 1]))

    def _between(self, source: Any, start: int, end: int) -> SharedColumns:
        """Return the columns ``source[:, start:end]``."""
        per_sample, shared, all_sources = self._columns(source)
        sources = all_sources[start:end]
        kinds = {kind for kind, _ in sources}
        return SharedColumns(
            per_sample if False in kinds else None, shared if True in kinds else None, sources
        )

    def _reshaped(self, node: Node) -> SharedColumns | None:
        """Follow a reshape between [B, C * D] and [B, C, D]."""
        columns = self._columns(node.args[0])
        before, after = _shape(node.args[0]), _shape(node)
        if len(before) == 2 and len(after) == 3 and before[1] == after[1] * after[2]:
            # [B, C * D] to [B, C, D]: columns can be followed only in whole groups of D.
            width = after[2]
            sources = columns.sources[::width]
            firsts = [
                (kind, column + at) for kind, column in sources for at in range(width) if column % width == 0
            ]
            shapes = [-1, width]
            if tuple(firsts) != columns.sources:
                return None
            sources = tuple((kind, column // width) for kind, column in sources)
        elif len(before) == 3 and len(after) == 2 and before[1] * before[2] == after[1]:
            width, shapes = before[2], []
            sources = tuple(
                (kind, column * width + at) for kind, column in columns.sources for at in range(width)
            )
        else:
            return None
        nodes: list[Node | None] = []
        for source in (columns.per_sample, columns.shared):
            if source is None:
                nodes.append(None)
                continue
            size = _shape(source)[1]
            if shapes and size % width:
                return None
            shape = [-1, size // width, width] if shapes else [-1, size * width]
            nodes.append(self._call(_aten.reshape.default, source, shape))
        return SharedColumns(nodes[0], nodes[1], sources)

    def _elementwise(self, node: Node) -> SharedColumns:
        """Apply an elementwise operator to shared and per-sample columns separately."""
        columns = self._columns(node.args[0])
        per_sample, shared = (
            source if source is None else self._call(node.target, source, *node.args[1:], **node.kwargs)
            for source in columns[:2]
        )
        return SharedColumns(per_sample, shared, columns.sources)

    def _rowwise(self, node: Node) -> SharedColumns | None:
        """Apply an operator to shared rows, if all input columns are shared. Return None otherwise.

        The operator computes every result row from the same row of its first argument.
        """
        return self._on_rows(node, node.args[:1])

    def _binary(self, node: Node) -> SharedColumns | None:
        """Apply a binary operator to shared rows. Return None if this is not possible.

        All tensor arguments must be shared completely, and must have as many dimensions as the result.
        """
        # An argument with fewer dimensions is broadcast, and has no row per sample.
        if any(
            isinstance(argument, Node) and len(_shape(argument)) != len(_shape(node))
            for argument in node.args
        ):
            return None
        return self._on_rows(node, [argument for argument in node.args if isinstance(argument, Node)])

    def _on_rows(self, node: Node, repeated: Sequence[Any]) -> SharedColumns | None:
        """Apply an operator to R shared rows instead of B samples.

        Args:
            node: node with the operator. It must compute every result row from the same row of all arguments
                in `repeated`.
            repeated: arguments of the node with a row per sample.

        Returns:
            Columns of the result, which are all shared. None if an argument in `repeated` has a column that
            is not shared.
        """
        given: dict[Any, Node] = {}
        for argument in repeated:
            columns = self._columns_of.get(argument)
            if columns is None or columns.per_sample is not None:
                return None
            given[argument] = self._select_columns(columns, True)
        arguments = [
            given.get(argument, argument) if isinstance(argument, Node) else argument
            for argument in node.args
        ]
        shared = self._call(node.target, *arguments, **node.kwargs)
        return SharedColumns(None, shared, tuple((True, column) for column in range(_shape(shared)[1])))

    def _dot_products(self, node: Node) -> SharedColumns | None:
        """Compute dot products of two shared vectors once per shared row.

        The original node still computes all dot products per sample. Nodes that read products of shared
        vectors read them from the new node instead. Return None if fewer than two vectors are shared, or if
        the dense vector is shared only in part.
        """
        dense, sparse = (self._columns(argument) for argument in node.args)
        kinds = {is_shared for is_shared, _ in dense.sources}
        # The dense vector must be completely shared or completely per sample.
        if len(kinds) != 1:
            return None
        is_shared = [kinds.pop(), *(kind for kind, _ in sparse.sources)]
        if sum(is_shared) < 2:
            return None
        vectors = self._select_columns(sparse, True)
        if is_shared[0]:
            first = self._select_columns(dense, True)
        else:
            # The operator needs a dense vector, so the first shared vector takes this role. The pairs stay
            # the same.
            first = self._call(_aten.select.int, vectors, 1, 0)
            vectors = self._call(_aten.slice.Tensor, vectors, 1, 1, _shape(vectors)[1])
        shared = self._call(_DOTS, first, vectors)
        width = _shape(node.args[0])[1]
        # The output has the dense vector first, then a column per pair of vectors.
        sources = [(is_shared[0], column) for column in range(width)]
        num_shared, num_all = width, width
        for one, other in combinations(is_shared, 2):
            both = one and other
            sources.append((True, num_shared) if both else (False, num_all))
            num_shared += both
            num_all += 1
        return SharedColumns(node, shared, tuple(sources))

    def _split_linear(self, node: Node) -> Node | None:
        """Split a linear layer over shared and per-sample columns into a sum of two layers.

        Returns:
            The node with the sum. None if too few columns are shared to save time, or if all are shared.
        """
        columns, weight = self._columns(node.args[0]), node.args[1]
        num_shared = len(columns.of(True))
        least = _MIN_SHARED * len(columns.sources)
        if len(_shape(node)) != 2 or not least < num_shared < len(columns.sources):
            return None
        assert isinstance(weight, Node)
        parts = []
        for is_shared in (False, True):
            # The bias is added once, in the shared layer.
            bias = node.args[2:] if is_shared else ()
            of_these = self._slices(weight, columns.of(is_shared))
            parts.append(self._call(_LINEAR, self._select_columns(columns, is_shared), of_these, *bias))
        return self._call(_aten.add.Tensor, parts[0], self._call(_SELECT, parts[1], 0, self._group))

    def _columns(self, node: Any) -> SharedColumns:
        """Return the columns of a node. If no rule has found shared columns, all columns are per sample."""
        columns = self._columns_of.get(node)
        if columns is None:
            columns = SharedColumns(node, None, tuple((False, column) for column in range(_shape(node)[1])))
        return columns

    def _select_columns(self, columns: SharedColumns, is_shared: bool) -> Node:
        """Return a node with only the shared columns, [R, ...], or only the per-sample columns, [B, ...]."""
        source = columns.shared if is_shared else columns.per_sample
        assert source is not None
        return self._slices(source, [column for kind, column in columns.sources if kind is is_shared])

    def _slices(self, source: Node, columns: Sequence[int]) -> Node:
        """Return a node with some columns of `source`; `source` itself if these are all columns in order.

        Consecutive columns are sliced together, and the slices are concatenated.
        """
        if list(columns) == list(range(_shape(source)[1])):
            return source
        # Consecutive columns are sliced together, as [start, end).
        runs: list[list[int]] = []
        for column in columns:
            if runs and runs[-1][1] == column:
                runs[-1][1] += 1
            else:
                runs.append([column, column + 1])
        return self._cat([self._call(_aten.slice.Tensor, source, 1, *run) for run in runs])

    def _cat(self, parts: Sequence[Node]) -> Node:
        """Return a node which concatenates the nodes by columns; the node itself if there is only one."""
        return self._call(_aten.cat.default, list(parts), 1) if len(parts) > 1 else parts[0]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of `target` before the current node, and return the new node.

        The node gets the metadata ``val``, from which later rules read the shape.
        """
        node: Node = self._graph.call_function(target, args, kwargs)
        values: Any = torch.fx.map_arg(args, lambda argument: argument.meta["val"])
        node.meta = {**self._current.meta, "val": target(*values, **kwargs)}
        self._touched.add(node)
        return node

    def _replace(self, node: Node, other: Node) -> None:
        """Let all users of a node read another node. `run` erases the unused node at the end."""
        node.replace_all_uses_with(other)
        self._touched.add(node)


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value; the first size may be symbolic."""
    return tuple(node.meta["val"].shape)


def _unaliased_node(index: Any) -> Any:
    """Return the node that computes an index.

    Skips operators that pass the index on unchanged, such as ``detach``, and the selection of a tensor from a
    stack.
    """
    while isinstance(index, Node):
        source: Any = index.args[0] if index.args else None
        if index.target in _UNCHANGED and isinstance(source, Node):
            # A cast changes the values, so its result is no alias.
            if source.meta["val"].dtype != index.meta["val"].dtype:
                break
            index = source
        elif index.target is _aten.select.int and _is_stack(source) and index.args[1] == 0:
            number: Any = index.args[2]
            index = source.args[0][number]
        else:
            break
    return index


def _is_stack(node: Any) -> bool:
    """Return whether a node stacks tensors along dimension 0."""
    dims: Iterable[Any] = node.args[1:] if isinstance(node, Node) else ()
    return isinstance(node, Node) and node.target is _aten.stack.default and not any(dims)
