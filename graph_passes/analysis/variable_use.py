"""Which stage owns a variable, who else uses it, and which ones forward writes."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.analysis.layers import written_variables
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import at


@dataclass(frozen=True)
class Variables:
    """``users``: for each variable the stages that use it, the owner first; ``state``: those forward writes."""

    users: tuple[tuple[str, tuple[int, ...]], ...]
    state: frozenset[str]

    def owned(self, stage: int) -> tuple[str, ...]:
        """Variables that live on ``stage``."""
        return tuple(name for name, stages in self.users if stages[0] == stage)

    def used(self, stage: int) -> tuple[str, ...]:
        """Variables that ``stage`` reads or writes."""
        return tuple(name for name, stages in self.users if stage in stages)

    def owner(self, name: str) -> int:
        """The stage that holds the variable and its update: the first that uses it."""
        return dict(self.users)[name][0]

    def copied(self, stage: int, replica: int) -> tuple[str, ...]:
        """Variables of which this replica works on a copy of its own.

        Those owned elsewhere (another device, or another stage: tied weights), and those that forward
        writes: the copy is committed only when the step has succeeded.
        """
        return tuple(
            name for name in self.used(stage) if name in self.state or replica > 0 or self.owner(name) != stage
        )


def find_variables(graph: Graph) -> Variables:
    """Read the use of variables off the stage functions of a graph."""
    users: dict[str, list[int]] = {}
    state: set[str] = set()
    count = sum(1 for function in graph.functions if function.name.endswith("/forward"))
    for stage in range(count):
        split = at(stage, what="weights") in graph.function_by_name
        for what in ("forward", "backward", "weights") if split else ("forward", "backward"):
            function = graph.function(at(stage, what=what))
            for _, port in function.input_ports("variable"):
                stages = users.setdefault(port.name, [])
                if stage not in stages:
                    stages.append(stage)
            state |= written_variables(function.graph).keys()
    return Variables(tuple((name, tuple(stages)) for name, stages in users.items()), frozenset(state))
