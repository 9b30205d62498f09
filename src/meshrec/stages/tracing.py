"""Trace a model with torch.fx, and group the nodes of the graph into units, from which stages are built.

A unit is a group of nodes which always run in the same stage. A submodule which cannot be traced, for example
because it branches on data, is a single node. Embedding tables are looked up and updated once per batch, for
all splits. Therefore the nodes which compute a table's input also run once per batch, in the table's unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn

from meshrec.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.linear import LogitLinear

_TABLES = (TableCollection, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


@dataclass(eq=False)
class Unit:
    """A group of graph nodes which always run in the same stage.

    Attributes:
        index: unit number. A unit reads only results of units with lower numbers.
        name: description for the user: the last submodule in the unit.
        nodes: nodes in execution order.
        once_per_batch: True if the unit runs once per batch (table lookups), False if it runs once per split
            (microbatch).
        needs: units whose results this unit reads, by number.
    """

    index: int
    name: str
    nodes: list[fx.Node]
    once_per_batch: bool
    needs: set[int] = field(default_factory=set)


class PartProgram(NamedTuple):
    """An executable part of a model.

    Attributes:
        module: module to call with the values ``input_names`` in order. It returns a tuple with the values
            ``output_names``.
        input_names: names of the arguments.
        output_names: names of the results.
    """

    module: fx.GraphModule
    input_names: list[str]
    output_names: list[str]


@dataclass(frozen=True)
class Traced:
    """A model traced with torch.fx, with its nodes grouped into units.

    Attributes:
        model: the model.
        input_program: program which maps the model's arguments to the batch values read by units, such as
            ``batch.sparse``.
        units: units in an executable order.
        output: output node in the graph. Its arguments are the values returned by the model.
    """

    model: nn.Module
    input_program: PartProgram
    units: list[Unit]
    output: fx.Node


def holds_tables(module: nn.Module) -> bool:
    """Return whether the module contains embedding tables."""
    return any(isinstance(child, _TABLES) for child in module.modules())


def trace(model: nn.Module) -> Traced:
    """Trace ``model`` with torch.fx, and group the graph's nodes into units.

    Raises:
        ValueError: the forward method of ``model`` itself cannot be traced.
    """
    tracer = _Tracer()
    try:
        graph = fx.GraphModule(model, tracer.trace(model)).graph
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__}.forward cannot be traced into stages: {error}. Move data-dependent "
            "branches into a submodule (it then stays whole), or pass nn.Sequential of the stages."
        ) from error
    # Otherwise nodes whose results nobody reads would become units.
    graph.eliminate_dead_code()
    inputs = _input_nodes(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    excluded = {*inputs, output}
    # get_attr nodes are copied into every program that needs them.
    nodes = [node for node in graph.nodes if node not in excluded and node.op != "get_attr"]
    return Traced(model, _input_program(model, inputs, output), _units(model, nodes, set(inputs)), output)


class _Tracer(fx.Tracer):
    """torch.fx tracer which keeps a submodule as a single node only if the submodule cannot be traced."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether to keep a submodule as a single node, without tracing into it."""
        # The last layer is a unit, as nn.Linear is: a stage may start at it.
        return isinstance(m, (*_TABLES, LogitLinear)) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the submodule ``m``. If tracing fails, add a single node for it instead.

        Args:
            m: submodule to call.
            forward: its forward method.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        # Attribute proxies become nodes on first use: create them now, outside the part which may be rolled
        # back.
        fx.node.map_aggregate(
            (args, kwargs), lambda argument: argument.node if isinstance(argument, fx.Proxy) else argument
        )
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # Roll back the nodes it created, last first, and keep the module as a single node.
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def _input_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the graph nodes which only read the batch.

    Such nodes are the model's arguments, and their attributes and items, such as ``batch.sparse``. No unit
    contains them.
    """
    # A dict serves as a set that keeps the order of the graph.
    inputs: dict[fx.Node, None] = {}
    for node in graph.nodes:
        takes_apart = node.op == "call_function" and getattr(node.target, "__name__", "") in (
            "getattr",
            "getitem",
        )
        if node.op == "placeholder" or (
            takes_apart and node.all_input_nodes and all(source in inputs for source in node.all_input_nodes)
        ):
            inputs[node] = None
    return list(inputs)


def _input_program(model: nn.Module, inputs: Sequence[fx.Node], output: fx.Node) -> PartProgram:
    """Return `Traced.input_program`, which maps the model's arguments to the batch values read by units."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # Return only values read by stages, because others need not have samples and could not be split.
    needed = [node for node in inputs if any(user is output or user not in copies for user in node.users)]
    graph.output(tuple(copies[node] for node in needed))
    arguments = [str(node.target) for node in inputs if node.op == "placeholder"]
    return PartProgram(fx.GraphModule(model, graph), arguments, [node.name for node in needed])


def _units(model: nn.Module, nodes: Sequence[fx.Node], inputs: set[fx.Node]) -> list[Unit]:
    """Group nodes into units."""
    group = _Groups(nodes)
    # Nodes which run once per batch: table lookups, and all nodes which compute their inputs.
    whole: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_module" and holds_tables(model.get_submodule(str(node.target))):
            for needed in [*_ancestors(node, inputs), node]:
                whole.add(needed)
                group.merge(needed, node)
    for node in nodes:
        # A node without parameters stays with the input's producer: a cut between them gains nothing,
        # and in-place operations and views must not be separated from their input.
        makers = [
            neighbor for neighbor in node.all_input_nodes if neighbor in group.root and neighbor not in whole
        ]
        users = [neighbor for neighbor in node.users if neighbor in group.root and neighbor not in whole]
        if node in whole or (
            node.op == "call_module" and not getattr(model.get_submodule(str(node.target)), "inplace", False)
        ):
            continue
        if len(makers) == 1:
            group.merge(makers[0], node)
        # A node without inputs from other units, such as one which only creates a constant, joins its user.
        elif not [neighbor for neighbor in node.all_input_nodes if neighbor in group.root] and users:
            group.merge(users[0], node)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(group.find(node), []).append(node)
    units = [
        Unit(i, _name(members_of_unit), members_of_unit, members_of_unit[0] in whole)
        for i, members_of_unit in enumerate(_in_order(members, group))
    ]
    of_node = {node: unit.index for unit in units for node in unit.nodes}
    for unit in units:
        unit.needs = {
            of_node[neighbor]
            for node in unit.nodes
            for neighbor in node.all_input_nodes
            if neighbor in of_node
        } - {unit.index}
    return units


class _Groups:
    """Union-find structure for nodes: two nodes with the same root belong to the same unit."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.root: dict[fx.Node, fx.Node] = {node: node for node in nodes}

    def find(self, node: fx.Node) -> fx.Node:
        """Return the node that represents the unit of ``node``."""
        while self.root[node] is not node:
            node = self.root[node]
        return node

    def merge(self, one: fx.Node, other: fx.Node) -> None:
        """Merge the units of two nodes."""
        self.root[self.find(other)] = self.find(one)


def _in_order(members: Mapping[fx.Node, list[fx.Node]], group: _Groups) -> list[list[fx.Node]]:
    """Sort groups of nodes so that every group comes after the groups whose results it reads.

    Groups which read from each other are merged. Apart from that, groups stay in graph order.
    """
    emitted: set[fx.Node] = set()
    waiting = dict(members)
    ordered: list[list[fx.Node]] = []
    while waiting:
        for root, members_of_group in waiting.items():
            needed = {
                group.find(source)
                for node in members_of_group
                for source in node.all_input_nodes
                if source in group.root
            }
            if needed - {root} <= emitted:
                break
        else:
            # Groups which read each other form a cycle: merge them.
            root = next(iter(waiting))
            members_of_group = [node for source in waiting.values() for node in source]
            for other in waiting:
                group.merge(root, other)
            waiting = {root: members_of_group}
            continue
        emitted.add(root)
        ordered.append(waiting.pop(root))
    return ordered


def _ancestors(node: fx.Node, inputs: set[fx.Node]) -> list[fx.Node]:
    """Return all nodes from which ``node`` is computed, without ``inputs`` and parameters."""
    ancestors: dict[fx.Node, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        needed = waiting.pop()
        if needed not in ancestors and needed not in inputs and needed.op != "get_attr":
            ancestors[needed] = None
            waiting += needed.all_input_nodes
    return list(ancestors)


def _name(nodes: Sequence[fx.Node]) -> str:
    """Return a unit's name: the path of the submodule called last.

    If the unit calls no submodule, return the name of the first node.
    """
    modules = [str(node.target) for node in nodes if node.op == "call_module"]
    return modules[-1] if modules else nodes[0].name


def path_of(node: fx.Node) -> str:
    """Return the path of the submodule which the node calls.

    Other nodes get the path of the innermost submodule whose forward method contains the node. The model
    itself has the path "".
    """
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {"": None}
    return str(list(stack)[-1])
