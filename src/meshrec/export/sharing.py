"""A rewrite of exported programs that computes what samples share once.

A program that takes ``group`` [B] repeats the shared rows, by ``x.index_select(0, group)``, where its model
joins them with rows of the samples. The model was written for samples that share nothing, so it continues
with the repeated rows. This rewrite follows the graph from there on. It tracks for each value which of its
columns depend on the group alone and which are the samples' own (`SharedColumns`). Then

- layers over columns of the group alone run on its R rows, and the result is repeated;
- a linear layer over both kinds is the sum of two: ``x W = own W_own + (shared W_shared)[group]``;
- dot products of two vectors of the group are taken on its R rows.

The rewrite changes the order of sums, so results agree up to rounding.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

# B samples, R rows that they share, C columns, D width of vectors

_aten = torch.ops.aten
_SELECT = _aten.index_select.default
_LINEAR = _aten.linear.default
_DOTS = torch.ops.meshrec.dot_interaction.default
_SAME = {_aten.alias.default, _aten.detach.default, _aten.to.dtype, _aten.to.device}
_BY_VALUE = {
    _aten.relu.default,
    _aten.gelu.default,
    _aten.silu.default,
    _aten.sigmoid.default,
    _aten.tanh.default,
    _aten.dropout.default,
}
"""Operators that map each number of their first argument by itself."""
_OF_TWO = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor}
_BY_ROW = {_LINEAR, _aten.layer_norm.default}
"""Operators that map each row of their first argument by itself."""
_SPLITS = {_aten.split_with_sizes.default, _aten.split.Tensor, _aten.chunk.default}
_SHAPES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.flatten.using_ints,
    _aten.unsqueeze.default,
}
_LEAST_SHARED = 0.2
"""The least share of a linear layer's columns that is worth splitting off: the extra sum has its cost."""


class SharedColumns(NamedTuple):
    """A value [B, C] or [B, C, D], by its columns.

    Attributes:
        own: a value with a row for each sample; None where it is not needed.
        shared: a value with a row for each of the group's; None where nothing is shared.
        places: for each column whether it is ``shared``, and which column of that (or of ``own``) it is.
    """

    own: Node | None
    shared: Node | None
    places: tuple[tuple[bool, int], ...]

    def of(self, is_shared: bool) -> list[int]:
        """Return the columns that are shared, or those that are not."""
        return [column for column, (kind, _) in enumerate(self.places) if kind is is_shared]


def compute_once(graph: Graph, group: Node) -> None:
    """Rewrite a program so that it computes what depends on ``group`` alone once per row of the group."""
    _Sharing(graph, group).run()


class _Sharing:
    def __init__(self, graph: Graph, group: Node) -> None:
        self._graph, self._group = graph, group
        self._known: dict[Node, SharedColumns] = {}
        self._touched: set[Node] = set()
        self._at: Node = group

    def run(self) -> None:
        for node in list(self._graph.nodes):
            rule = self._rule_of(node)
            if rule is None:
                continue
            self._at = node
            with self._graph.inserting_before(node), torch.no_grad():
                if node.target is _LINEAR and (split := self._split(node)) is not None:
                    self._replace(node, split)
                    continue
                columns = rule(node)
                if columns is None:
                    continue
                if columns.own is None and node.target is not _SELECT:
                    rows = self._picked(columns, True)
                    late = self._call(_SELECT, rows, 0, self._group)
                    self._replace(node, late)
                    self._known[late] = columns
                self._known[node] = columns
                self._touched.add(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self._touched and not node.users:
                self._graph.erase_node(node)

    def _rule_of(self, node: Node) -> "Callable[[Node], SharedColumns | None] | None":
        if node.op != "call_function":
            return None
        if node.target is _SELECT:
            return self._repeated
        if node.target is operator.getitem:
            return self._part
        if not any(each in self._known for each in node.all_input_nodes):
            return None
        for targets, rule in (
            ({_aten.cat.default}, self._joined),
            ({_aten.slice.Tensor}, self._slice),
            (_SHAPES, self._reshaped),
            (_BY_VALUE, self._by_value),
            (_BY_ROW, self._by_row),
            (_OF_TWO, self._of_two),
            ({_DOTS}, self._dots),
        ):
            if node.target in targets:
                return rule
        return None

    # Each rule returns the columns of a node, or None if it cannot tell.

    def _repeated(self, node: Node) -> SharedColumns | None:
        rows, dim, index = node.args
        if dim != 0 or _origin(index) is not self._group or len(_shape(rows)) not in (2, 3):
            return None
        assert isinstance(rows, Node)
        return SharedColumns(None, rows, tuple((True, column) for column in range(_shape(rows)[1])))

    def _joined(self, node: Node) -> SharedColumns | None:
        given: Any = node.args[0]
        dims = len(_shape(node))
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        if dim % dims != 1 or dims > 3:
            return None
        sources: dict[bool, list[Node]] = {False: [], True: []}
        widths = {False: 0, True: 0}
        places: list[tuple[bool, int]] = []
        for each in map(self._columns, given):
            starts = dict(widths)
            for is_shared, source in ((False, each.own), (True, each.shared)):
                if source is not None:
                    sources[is_shared].append(source)
                    widths[is_shared] += _shape(source)[1]
            places += [(is_shared, starts[is_shared] + place) for is_shared, place in each.places]
        own, shared = (self._cat(each) if each else None for each in sources.values())
        return SharedColumns(own, shared, tuple(places))

    def _slice(self, node: Node) -> SharedColumns | None:
        source, dim, *span = node.args
        width = len(self._columns(source).places)
        if dim != 1 or (len(span) > 2 and span[2] != 1):
            return None
        return self._between(source, *slice(*span).indices(width)[:2])

    def _part(self, node: Node) -> SharedColumns | None:
        """Return the columns of one part of a value that was split."""
        split: Any = node.args[0]
        if split.target not in _SPLITS or split.args[0] not in self._known:
            return None
        if len(split.args) < 3 or split.args[2] % len(_shape(split.args[0])) != 1:
            return None
        number: Any = node.args[1]
        widths = [each.shape[1] for each in split.meta["val"]]
        return self._between(split.args[0], sum(widths[:number]), sum(widths[: number + 1]))

    def _between(self, source: Any, start: int, end: int) -> SharedColumns:
        own, shared, all_places = self._columns(source)
        places = all_places[start:end]
        kinds = {kind for kind, _ in places}
        return SharedColumns(own if False in kinds else None, shared if True in kinds else None, places)

    def _reshaped(self, node: Node) -> SharedColumns | None:
        """Follow a reshape between [B, C * D] and [B, C, D]."""
        columns = self._columns(node.args[0])
        before, after = _shape(node.args[0]), _shape(node)
        if len(before) == 2 and len(after) == 3 and before[1] == after[1] * after[2]:
            width = after[2]
            places = columns.places[::width]
            firsts = [
                (kind, place + at) for kind, place in places for at in range(width) if place % width == 0
            ]
            shapes = [-1, width]
            if tuple(firsts) != columns.places:
                return None
            places = tuple((kind, place // width) for kind, place in places)
        elif len(before) == 3 and len(after) == 2 and before[1] * before[2] == after[1]:
            width, shapes = before[2], []
            places = tuple(
                (kind, place * width + at) for kind, place in columns.places for at in range(width)
            )
        else:
            return None
        sources: list[Node | None] = []
        for source in (columns.own, columns.shared):
            if source is None:
                sources.append(None)
                continue
            size = _shape(source)[1]
            if shapes and size % width:
                return None
            shape = [-1, size // width, width] if shapes else [-1, size * width]
            sources.append(self._call(_aten.reshape.default, source, shape))
        return SharedColumns(sources[0], sources[1], places)

    def _by_value(self, node: Node) -> SharedColumns:
        columns = self._columns(node.args[0])
        own, shared = (
            source if source is None else self._call(node.target, source, *node.args[1:], **node.kwargs)
            for source in columns[:2]
        )
        return SharedColumns(own, shared, columns.places)

    def _by_row(self, node: Node) -> SharedColumns | None:
        return self._on_rows(node, node.args[:1])

    def _of_two(self, node: Node) -> SharedColumns | None:
        if any(isinstance(each, Node) and len(_shape(each)) != len(_shape(node)) for each in node.args):
            return None
        return self._on_rows(node, [each for each in node.args if isinstance(each, Node)])

    def _on_rows(self, node: Node, repeated: Sequence[Any]) -> SharedColumns | None:
        """Apply an operator on the group's rows, if all its arguments with rows depend on the group alone."""
        given: dict[Any, Node] = {}
        for each in repeated:
            columns = self._known.get(each)
            if columns is None or columns.own is not None:
                return None
            given[each] = self._picked(columns, True)
        arguments = [given.get(each, each) if isinstance(each, Node) else each for each in node.args]
        shared = self._call(node.target, *arguments, **node.kwargs)
        return SharedColumns(None, shared, tuple((True, column) for column in range(_shape(shared)[1])))

    def _dots(self, node: Node) -> SharedColumns | None:
        """Compute dot products of two shared vectors once per row of the group, and all others per sample."""
        dense, sparse = (self._columns(each) for each in node.args)
        kinds = {is_shared for is_shared, _ in dense.places}
        if len(kinds) != 1:
            return None
        is_shared = [kinds.pop(), *(kind for kind, _ in sparse.places)]
        if sum(is_shared) < 2:
            return None
        vectors = self._picked(sparse, True)
        if is_shared[0]:
            first = self._picked(dense, True)
        else:
            first = self._call(_aten.select.int, vectors, 1, 0)
            vectors = self._call(_aten.slice.Tensor, vectors, 1, 1, _shape(vectors)[1])
        shared = self._call(_DOTS, first, vectors)
        width = _shape(node.args[0])[1]
        places = [(is_shared[0], column) for column in range(width)]
        num_shared, num_all = width, width
        for one, other in combinations(is_shared, 2):
            both = one and other
            places.append((True, num_shared) if both else (False, num_all))
            num_shared += both
            num_all += 1
        return SharedColumns(node, shared, tuple(places))

    def _split(self, node: Node) -> Node | None:
        """Write a linear layer over both kinds of columns as the sum of two."""
        columns, weight = self._columns(node.args[0]), node.args[1]
        num_shared = len(columns.of(True))
        least = _LEAST_SHARED * len(columns.places)
        if len(_shape(node)) != 2 or not least < num_shared < len(columns.places):
            return None
        assert isinstance(weight, Node)
        parts = []
        for is_shared in (False, True):
            bias = node.args[2:] if is_shared else ()
            of_these = self._slices(weight, columns.of(is_shared))
            parts.append(self._call(_LINEAR, self._picked(columns, is_shared), of_these, *bias))
        return self._call(_aten.add.Tensor, parts[0], self._call(_SELECT, parts[1], 0, self._group))

    def _columns(self, node: Any) -> SharedColumns:
        found = self._known.get(node)
        if found is None:
            found = SharedColumns(node, None, tuple((False, column) for column in range(_shape(node)[1])))
        return found

    def _picked(self, columns: SharedColumns, is_shared: bool) -> Node:
        """Return the shared columns on the group's rows, or the columns that are not shared."""
        source = columns.shared if is_shared else columns.own
        assert source is not None
        return self._slices(source, [place for kind, place in columns.places if kind is is_shared])

    def _slices(self, source: Node, places: Sequence[int]) -> Node:
        if list(places) == list(range(_shape(source)[1])):
            return source
        runs: list[list[int]] = []
        for place in places:
            if runs and runs[-1][1] == place:
                runs[-1][1] += 1
            else:
                runs.append([place, place + 1])
        return self._cat([self._call(_aten.slice.Tensor, source, 1, *run) for run in runs])

    def _cat(self, parts: Sequence[Node]) -> Node:
        return self._call(_aten.cat.default, list(parts), 1) if len(parts) > 1 else parts[0]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node: Node = self._graph.call_function(target, args, kwargs)
        values: Any = torch.fx.map_arg(args, lambda each: each.meta["val"])
        node.meta = {**self._at.meta, "val": target(*values, **kwargs)}
        self._touched.add(node)
        return node

    def _replace(self, node: Node, other: Node) -> None:
        node.replace_all_uses_with(other)
        self._touched.add(node)


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value, whose first size may be a symbol."""
    return tuple(node.meta["val"].shape)


def _origin(index: Any) -> Any:
    """Return the node that an index comes from, through operators that do not change it."""
    while isinstance(index, Node):
        source: Any = index.args[0] if index.args else None
        if index.target in _SAME and isinstance(source, Node):
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
    dims: Iterable[Any] = node.args[1:] if isinstance(node, Node) else ()
    return isinstance(node, Node) and node.target is _aten.stack.default and not any(dims)
