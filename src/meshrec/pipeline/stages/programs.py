"""Assignment of units to stages, and the program of each stage."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx, nn

from meshrec.pipeline.stages.tracing import PartProgram, Traced, path_of


@dataclass(frozen=True)
class StageProgram:
    """The program of a stage. ``whole`` runs once per batch before the splits; ``split`` runs for every
    split.
    """

    index: int
    name: str
    whole: PartProgram | None
    split: PartProgram


class Staging(NamedTuple):
    """The stages of a model. ``stage_of``: the stage of each unit; ``output``: the node that the model
    returns.
    """

    stages: list[StageProgram]
    stage_of: list[int]
    output: fx.Node

    def makers(self) -> dict[str, int]:
        """Return the stage that makes each value. Values of the batch are not included."""
        programs = [(stage.index, p) for stage in self.stages for p in (stage.whole, stage.split) if p]
        return {name: index for index, program in programs for name in program.gives}

    def users(self) -> dict[str, list[int]]:
        """Return for each value the other stages that read it."""
        makers = self.makers()
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.split.takes:
                if makers.get(name, stage.index) != stage.index:
                    found.setdefault(name, []).append(stage.index)
        return found


class StageFlow:
    """The values that one stage exchanges with the others.

    Args:
        staging: all stages.
        index: this stage.
        carried: values of earlier stages that the last stage receives only to return them.

    Attributes:
        stage: the program of this stage.
        last: the index of the last stage.
        makers: the stage that makes each value. Values of the batch are not included.
        users: the other stages that read each value.
        takes: values that ``forward`` reads, those of the program first.
        output: the node that the model returns.
    """

    def __init__(self, staging: Staging, index: int, carried: Sequence[str] = ()) -> None:
        self.stage, self.output = staging.stages[index], staging.output
        self.last = len(staging.stages) - 1
        self.makers, self.users = staging.makers(), staging.users()
        for name in carried:
            self.users.setdefault(name, []).append(self.last)
        self.takes = [*self.stage.split.takes, *(name for name in carried if index == self.last)]

    @property
    def returned(self) -> list[str]:
        """Names of the values that the model returns."""
        return [node.name for node in self.output.all_input_nodes]

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage.index == self.last


def at_cuts(traced: Traced, cuts: Sequence[str]) -> list[int]:
    """Return the stage of each unit, where a new stage begins at the first unit of each submodule in
    ``cuts``.

    Raises:
        ValueError: a name is no submodule, holds nothing that runs, or begins where a stage already begins;
            or the names are not in the order in which the model runs.
    """
    firsts = []
    for cut in cuts:
        own = [
            unit.index
            for unit in traced.units
            if any(path == cut or path.startswith(f"{cut}.") for path in map(path_of, unit.nodes))
        ]
        if not own:
            names = ", ".join(dict(traced.model.named_modules()))
            raise ValueError(
                f"cuts names {cut!r}, but no part of the model that runs has that name. Its submodules are: "
                f"{names.lstrip(', ')}."
            )
        firsts.append(own[0])
    order = [0, *firsts]
    for (before, after), cut in zip(itertools.pairwise(order), cuts, strict=True):
        if after <= before:
            raise ValueError(
                f"a stage would begin at {cut!r}, which runs first or not after the cut before it: a stage "
                "before it would be empty. Name the cuts in the order in which the model runs."
            )
    bounds = [*firsts, len(traced.units)]
    return [next(s for s, bound in enumerate(bounds) if unit.index < bound) for unit in traced.units]


def names_of(traced: Traced, stage_of: Sequence[int]) -> list[str]:
    """Return the cuts that `at_cuts` turns into these stages; an empty list if no names do."""
    firsts = [next(u for u in traced.units if stage_of[u.index] == s) for s in range(1, max(stage_of) + 1)]
    cuts = [next((path for path in map(path_of, unit.nodes) if path), "") for unit in firsts]
    try:
        return cuts if at_cuts(traced, cuts) == list(stage_of) else []
    except ValueError:
        return []


def stage_programs(traced: Traced, stage_of: Sequence[int]) -> Staging:
    """Build the programs of an assignment of units to stages. No unit may read what a later stage makes.

    Raises:
        ValueError: stages share a module with parameters.
    """
    num_stages = max(stage_of) + 1
    for unit in traced.units:
        assert all(stage_of[needed] <= stage_of[unit.index] for needed in unit.needs)
    _check_not_shared(traced, stage_of)
    names = [
        [unit.name for unit in traced.units if stage_of[unit.index] == stage] for stage in range(num_stages)
    ]
    final = set(traced.output.all_input_nodes)
    stages = []
    for stage in range(num_stages):
        own = [unit for unit in traced.units if stage_of[unit.index] == stage]
        whole = [node for unit in own if unit.whole for node in unit.nodes]
        split = [node for unit in own if not unit.whole for node in unit.nodes]
        title = f"{names[stage][0]} to {names[stage][-1]}" if len(names[stage]) > 1 else "".join(names[stage])
        stages.append(
            StageProgram(
                stage,
                title,
                program(traced, whole, final) if whole else None,
                program(traced, split, final),
            )
        )
    return Staging(stages, list(stage_of), traced.output)


def program(traced: Traced, nodes: Sequence[fx.Node], final: set[fx.Node]) -> PartProgram:
    """Build a program from some nodes; ``final``: the nodes that the model returns."""
    own = set(nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    takes: list[str] = []
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed not in own and needed not in copies and needed.op != "get_attr":
                copies[needed] = graph.placeholder(needed.name)
                takes.append(needed.name)
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed.op == "get_attr" and needed not in copies:
                copies[needed] = graph.node_copy(needed)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    gives = [node for node in nodes if node in final or any(user not in own for user in node.users)]
    graph.output(tuple(copies[node] for node in gives))
    return PartProgram(fx.GraphModule(traced.model, graph), takes, [node.name for node in gives])


def shared_parameters(traced: Traced) -> dict[str, list[int]]:
    """Return the parameters that several units use, by name, with the indices of these units."""
    users: dict[Tensor, tuple[str, dict[int, None]]] = {}
    for unit in traced.units:
        for node in unit.nodes:
            for name, parameter in _parameters_of(traced.model, node):
                users.setdefault(parameter, (name, {}))[1][unit.index] = None
    return {name: list(units) for name, units in users.values() if len(units) > 1}


def _check_not_shared(traced: Traced, stage_of: Sequence[int]) -> None:
    for name, units in shared_parameters(traced).items():
        stages = sorted({stage_of[unit] for unit in units})
        if len(stages) > 1:
            raise ValueError(
                f"{name!r} is used in stage {' and in stage '.join(map(str, stages))}: a parameter lives in "
                "one stage. Move the cut so that all its uses are in one, or give each its own."
            )


def _parameters_of(model: nn.Module, node: fx.Node) -> list[tuple[str, nn.Parameter]]:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return [(f"{node.target}.{name}", p) for name, p in module.named_parameters()]
    found = []
    for needed in node.all_input_nodes:
        if needed.op == "get_attr":
            path, _, name = str(needed.target).rpartition(".")
            value = getattr(model.get_submodule(path), name)
            if isinstance(value, nn.Parameter):
                found.append((str(needed.target), value))
    return found
