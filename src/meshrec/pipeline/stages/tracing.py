"""A model as a graph of units: the pieces that stages consist of, and the values between them.

The model is traced with torch.fx. A submodule that cannot be traced, for example because it branches on data,
becomes one unit. Tables work on the whole batch, so that they are looked up and updated once per batch; a
table and everything that computes its input are one unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn

from meshrec.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.modules.embedding_modules import TableCollection

_TABLES = (TableCollection, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


@dataclass(eq=False)
class Unit:
    """Nodes that stay in one stage. ``whole``: it works on the whole batch. ``name``: for people."""

    index: int
    name: str
    nodes: list[fx.Node]
    whole: bool
    needs: set[int] = field(default_factory=set)
    """Units whose results it reads."""


class PartProgram(NamedTuple):
    """A part of the model. Called with the values of ``takes`` it returns a tuple of the values of
    ``gives``.
    """

    module: fx.GraphModule
    takes: list[str]
    gives: list[str]


@dataclass(frozen=True)
class Traced:
    """A traced model.

    ``units`` are in an order in which they can run. ``taking`` extracts the values of the batch from the
    model's arguments. ``output`` is the node that the model returns.
    """

    model: nn.Module
    taking: PartProgram
    units: list[Unit]
    output: fx.Node


def holds_tables(module: nn.Module) -> bool:
    """Return whether the module contains embedding tables."""
    return any(isinstance(child, _TABLES) for child in module.modules())


def trace(model: nn.Module) -> Traced:
    """Split ``model`` into units by tracing it.

    Raises:
        ValueError: the forward method of ``model`` itself cannot be traced.
    """
    tracer = _Tracer()
    try:
        graph = fx.GraphModule(model, tracer.trace(model)).graph
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__}.forward cannot be traced into stages: {error}. Move what branches on "
            "data into a submodule (it then stays in one piece), or pass nn.Sequential of the stages."
        ) from error
    graph.eliminate_dead_code()
    inputs = _inputs(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    taken = {*inputs, output}
    nodes = [node for node in graph.nodes if node not in taken and node.op != "get_attr"]
    return Traced(model, _taking(model, inputs, output), _units(model, nodes, set(inputs)), output)


class _Tracer(fx.Tracer):
    """Tracer that looks into submodules as far as it can."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _TABLES) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Attributes of the batch become nodes when they are first used: not inside what may be taken back.
        fx.node.map_aggregate((args, kwargs), lambda each: each.node if isinstance(each, fx.Proxy) else each)
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # What it left in the graph is taken back, the last first, and the module stays in one piece.
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the arguments of the model, and attributes and items of them."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        takes_apart = node.op == "call_function" and getattr(node.target, "__name__", "") in (
            "getattr",
            "getitem",
        )
        if node.op == "placeholder" or (
            takes_apart and node.all_input_nodes and all(each in found for each in node.all_input_nodes)
        ):
            found[node] = None
    return list(found)


def _taking(model: nn.Module, inputs: Sequence[fx.Node], output: fx.Node) -> PartProgram:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # What the stages read, not what it was taken from: a batch may hold things that have no samples.
    wanted = [node for node in inputs if any(user is output or user not in copies for user in node.users)]
    graph.output(tuple(copies[node] for node in wanted))
    arguments = [str(node.target) for node in inputs if node.op == "placeholder"]
    return PartProgram(fx.GraphModule(model, graph), arguments, [node.name for node in wanted])


def _units(model: nn.Module, nodes: Sequence[fx.Node], inputs: set[fx.Node]) -> list[Unit]:
    group = _Groups(nodes)
    whole: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_module" and holds_tables(model.get_submodule(str(node.target))):
            for needed in [*_ancestors(node, inputs), node]:
                whole.add(needed)
                group.merge(needed, node)
    for node in nodes:
        # What has no parameters stays with what made its input: a cut between the two gains nothing, and what
        # writes over its input or looks at it in another shape must not be cut off.
        makers = [each for each in node.all_input_nodes if each in group.root and each not in whole]
        users = [each for each in node.users if each in group.root and each not in whole]
        if node in whole or (node.op == "call_module" and not _in_place(model, node)):
            continue
        if len(makers) == 1:
            group.merge(makers[0], node)
        elif not [each for each in node.all_input_nodes if each in group.root] and users:
            group.merge(users[0], node)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(group.find(node), []).append(node)
    units = [Unit(i, _name(own), own, own[0] in whole) for i, own in enumerate(_in_order(members, group))]
    of_node = {node: unit.index for unit in units for node in unit.nodes}
    for unit in units:
        unit.needs = {
            of_node[each] for node in unit.nodes for each in node.all_input_nodes if each in of_node
        } - {unit.index}
    return units


class _Groups:
    """Union-find of nodes that belong together."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.root: dict[fx.Node, fx.Node] = {node: node for node in nodes}

    def find(self, node: fx.Node) -> fx.Node:
        while self.root[node] is not node:
            node = self.root[node]
        return node

    def merge(self, one: fx.Node, other: fx.Node) -> None:
        self.root[self.find(other)] = self.find(one)


def _in_order(members: Mapping[fx.Node, list[fx.Node]], group: _Groups) -> list[list[fx.Node]]:
    """Return the groups, each after those whose results it reads, otherwise in graph order."""
    done: set[fx.Node] = set()
    waiting = dict(members)
    found: list[list[fx.Node]] = []
    while waiting:
        for root, own in waiting.items():
            needed = {group.find(each) for node in own for each in node.all_input_nodes if each in group.root}
            if needed - {root} <= done:
                break
        else:
            # Groups that read each other cannot be told apart: they are one.
            root = next(iter(waiting))
            own = [node for each in waiting.values() for node in each]
            for other in waiting:
                group.merge(root, other)
            waiting = {root: own}
            continue
        done.add(root)
        found.append(waiting.pop(root))
    return found


def _ancestors(node: fx.Node, inputs: set[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each not in found and each not in inputs and each.op != "get_attr":
            found[each] = None
            waiting += each.all_input_nodes
    return list(found)


def _in_place(model: nn.Module, node: fx.Node) -> bool:
    return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))


def _name(nodes: Sequence[fx.Node]) -> str:
    modules = [str(node.target) for node in nodes if node.op == "call_module"]
    return modules[-1] if modules else nodes[0].name


def path_of(node: fx.Node) -> str:
    """Return the submodule that a node belongs to; "" for the model itself."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {"": None}
    return str(list(stack)[-1])
