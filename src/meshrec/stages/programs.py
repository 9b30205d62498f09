"""Turn a cut, which assigns units to stages, into an executable program for every stage.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx, nn

from meshrec.stages.tracing import PartProgram, Traced, path_of


@dataclass(frozen=True)
class StageProgram:
    """The executable programs for a stage.

    Attributes:
        index: stage number.
        name: description for the user: the first and the last unit's name.
        batch_program: program with the table lookups, which runs once per batch. None if the stage has no
            tables.
        split_program: program with all other units (groups of graph nodes), which runs once per split
            (microbatch).
    """

    index: int
    name: str
    batch_program: PartProgram | None
    split_program: PartProgram


class Staging(NamedTuple):
    """All stages of a model.

    Attributes:
        stages: programs for every stage.
        stage_of: stage number for every unit.
        output: output node in the model's graph. Its arguments are the values the model returns.
    """

    stages: list[StageProgram]
    stage_of: list[int]
    output: fx.Node

    def producer_stage(self) -> dict[str, int]:
        """Return for every computed value the number of the stage which computes it, by value name.

        Values which the batch contains are not included.
        """
        programs = [
            (stage.index, p) for stage in self.stages for p in (stage.batch_program, stage.split_program) if p
        ]
        return {name: index for index, program in programs for name in program.output_names}

    def consumer_stages(self) -> dict[str, list[int]]:
        """Return the numbers of the stages which receive a value from another stage, by value name.

        A value is not included if only the stage which computes it reads it.
        """
        producer_stage = self.producer_stage()
        consumer_stages: dict[str, list[int]] = {}
        for stage in self.stages:
            # Table lookups take only batch values, so only the program for splits reads values of other
            # stages.
            for name in stage.split_program.input_names:
                if producer_stage.get(name, stage.index) != stage.index:
                    consumer_stages.setdefault(name, []).append(stage.index)
        return consumer_stages


class StageFlow:
    """Values that a stage receives from other stages, and values that it sends to them.

    Attributes:
        stage: this stage's programs.
        last: last stage number.
        producer_stage: number of the stage which computes a value, by value name. Values in the batch are
            not included.
        consumer_stages: numbers of the stages which receive a value from another stage, by value name.
        input_names: names of values this stage needs for a split (microbatch): first the arguments of
            ``stage.split_program``, then ``carried`` values on the last stage.
        output: output node in the model's graph.
    """

    def __init__(self, staging: Staging, index: int, carried: Sequence[str] = ()) -> None:
        self.stage, self.output = staging.stages[index], staging.output
        self.last = len(staging.stages) - 1
        self.producer_stage, self.consumer_stages = staging.producer_stage(), staging.consumer_stages()
        for name in carried:
            self.consumer_stages.setdefault(name, []).append(self.last)
        # The order matters: `StageRun.forward` passes the first values to the program, and only returns the
        # carried values.
        self.input_names = [
            *self.stage.split_program.input_names,
            *(name for name in carried if index == self.last),
        ]

    @property
    def output_names(self) -> list[str]:
        """Names of the values the model returns."""
        return [node.name for node in self.output.all_input_nodes]

    @property
    def is_last(self) -> bool:
        return self.stage.index == self.last


def stages_at_cuts(traced: Traced, cuts: Sequence[str]) -> list[int]:
    """Return the stage number for every unit if a new stage starts at every submodule in ``cuts``.

    A submodule with several units starts the stage at the first of them.

    Args:
        cuts: submodule names, in execution order; one fewer than there are stages.

    Raises:
        ValueError: ``cuts`` contains a name that is not an executed submodule, a submodule that would leave
            a stage empty, or submodules that are not in execution order.
    """
    firsts = []
    for cut in cuts:
        indices = [
            unit.index
            for unit in traced.units
            # A submodule may have several units, or share a unit with others.
            if any(path == cut or path.startswith(f"{cut}.") for path in map(path_of, unit.nodes))
        ]
        if not indices:
            names = ", ".join(dict(traced.model.named_modules()))
            raise ValueError(
                f"cuts has {cut!r}, but no executed part of the model has that name. Submodules: "
                f"{names.lstrip(', ')}."
            )
        firsts.append(indices[0])
    # The first stage starts at unit 0, without a cut.
    order = [0, *firsts]
    for (before, after), cut in zip(itertools.pairwise(order), cuts, strict=True):
        if after <= before:
            raise ValueError(
                f"a stage would start at {cut!r}, which runs first or not after the previous cut: a stage "
                "would be empty. Pass the cuts in execution order."
            )
    bounds = [*firsts, len(traced.units)]
    return [next(s for s, bound in enumerate(bounds) if unit.index < bound) for unit in traced.units]


def names_of(traced: Traced, stage_of: Sequence[int]) -> list[str]:
    """Return the submodule names for which `stages_at_cuts` returns ``stage_of``.

    The list is empty if some stage starts inside a submodule, because no names express such a cut.
    """
    firsts = [next(u for u in traced.units if stage_of[u.index] == s) for s in range(1, max(stage_of) + 1)]
    cuts = [next((path for path in map(path_of, unit.nodes) if path), "") for unit in firsts]
    try:
        # Cuts are names of submodules. Stages may also start at a unit that no submodule's name identifies.
        return cuts if stages_at_cuts(traced, cuts) == list(stage_of) else []
    except ValueError:
        return []


def stage_programs(traced: Traced, stage_of: Sequence[int]) -> Staging:
    """Return all stages with their executable programs.

    Args:
        stage_of: stage number for every unit. A unit must not read a value from a later stage.

    Raises:
        ValueError: several stages use the same parameter.
    """
    num_stages = max(stage_of) + 1
    for unit in traced.units:
        assert all(stage_of[needed] <= stage_of[unit.index] for needed in unit.needs)
    _check_not_shared(traced, stage_of)
    # Names of all units in every stage, for the description.
    names = [
        [unit.name for unit in traced.units if stage_of[unit.index] == stage] for stage in range(num_stages)
    ]
    # Values which the model returns must be results of some program.
    final = set(traced.output.all_input_nodes)
    stages = []
    for stage in range(num_stages):
        members = [unit for unit in traced.units if stage_of[unit.index] == stage]
        whole = [node for unit in members if unit.once_per_batch for node in unit.nodes]
        split = [node for unit in members if not unit.once_per_batch for node in unit.nodes]
        title = f"{names[stage][0]} to {names[stage][-1]}" if len(names[stage]) > 1 else "".join(names[stage])
        stages.append(
            StageProgram(
                stage, title, program(traced, whole, final) if whole else None, program(traced, split, final)
            )
        )
    return Staging(stages, list(stage_of), traced.output)


def program(traced: Traced, nodes: Sequence[fx.Node], final: set[fx.Node]) -> PartProgram:
    """Return an executable program for some nodes of the model's graph.

    Values that the nodes read from other nodes become the program's arguments. The program returns the values
    that other nodes read or that the model returns.

    Args:
        traced: traced model.
        nodes: nodes of the program, in execution order.
        final: nodes whose values the model returns.
    """
    members = set(nodes)
    graph = fx.Graph()
    # Values from other programs become placeholders. get_attr nodes are copied, as all programs share the
    # model.
    copies: dict[fx.Node, fx.Node] = {}
    input_names: list[str] = []
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed not in members and needed not in copies and needed.op != "get_attr":
                copies[needed] = graph.placeholder(needed.name)
                input_names.append(needed.name)
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed.op == "get_attr" and needed not in copies:
                copies[needed] = graph.node_copy(needed)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if node in final or any(user not in members for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    return PartProgram(fx.GraphModule(traced.model, graph), input_names, [node.name for node in outputs])


def shared_parameters(traced: Traced) -> dict[str, list[int]]:
    """Return the parameters used by several units, as unit numbers by parameter name."""
    # Keyed by the tensor, because tied weights have several names. The inner dict is an ordered set.
    users: dict[Tensor, tuple[str, dict[int, None]]] = {}
    for unit in traced.units:
        for node in unit.nodes:
            for name, parameter in _parameters_of(traced.model, node):
                users.setdefault(parameter, (name, {}))[1][unit.index] = None
    return {name: list(units) for name, units in users.values() if len(units) > 1}


def _check_not_shared(traced: Traced, stage_of: Sequence[int]) -> None:
    """Raise ValueError if several stages use the same parameter."""
    for name, units in shared_parameters(traced).items():
        stages = sorted({stage_of[unit] for unit in units})
        if len(stages) > 1:
            raise ValueError(
                f"{name!r} is used in stage {' and in stage '.join(map(str, stages))}, but a parameter must "
                "be in one stage. Move the cut so that one stage has all uses, or use separate parameters."
            )


def _parameters_of(model: nn.Module, node: fx.Node) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters that a node reads, through a submodule or as an argument."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return [(f"{node.target}.{name}", p) for name, p in module.named_parameters()]
    parameters = []
    for needed in node.all_input_nodes:
        # Functional calls, such as torch.matmul(x, self.weight), read parameters through get_attr nodes.
        if needed.op == "get_attr":
            path, _, name = str(needed.target).rpartition(".")
            value = getattr(model.get_submodule(path), name)
            if isinstance(value, nn.Parameter):
                parameters.append((str(needed.target), value))
    return parameters
