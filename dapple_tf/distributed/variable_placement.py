"""Place variables: a rank holds those of its stages, and frees the memory of all others.

Before a program runs, and as soon as it is built, every rank receives the variables that its part needs and drops the
rest. Reading a dropped variable fails with an error that says what to do; it does not give an outdated value.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf import internals
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.optimizer_settings import find_settings
from dapple_tf.distributed.variable_locations import VariableNeeds
from dapple_tf.distributed.variable_transfer import Transfer, send_values
from dapple_tf.staged_model import StagedModel
from graph_passes.analysis.resident_variables import resident_variables
from graph_passes.ir.graph import Graph

_ADVICE = "other ranks of the job hold and train it; call step.gather() on every rank before this"


def find_variable_needs(model: StagedModel, graphs: Sequence[Graph]) -> VariableNeeds:
    """Return the variables of ``model`` with the ranks that need them; ``graphs[i]`` is rank i's part.

    Every rank needs the settings of the optimizer.
    """
    settings = find_settings(model)
    held = [resident_variables(graph) | settings.keys() for graph in graphs]
    return VariableNeeds(
        tuple(
            (variable, frozenset(rank for rank, names in enumerate(held) if name in names))
            for name, variable in model.variables.items()
        )
    )


def place_variables(job: Job, needs: VariableNeeds, *, synchronize: bool = False) -> None:
    """Send every rank the variables that it needs and lacks, and drop those that only other ranks need.

    ``synchronize``: send also what a rank has, so that all ranks have rank 0's values. A variable that no rank needs
    stays where it is. Every rank must call this, with equal needs.
    """
    locations = job.variable_locations
    if locations.placed_for is needs and not synchronize:
        if locations.release is None:
            others = [v for v, _ in needs.ranks if job.rank not in (locations.ranks_of(v) or ())]
            locations.release = internals.make_releaser(others)
        locations.release()
        return
    transfers, dropped = [], []
    for variable, ranks in needs.ranks:
        holders, source = locations.ranks_of(variable), locations.source(variable)
        wanted = ranks or frozenset({source})
        if synchronize or holders is None or wanted - holders:
            transfers.append(Transfer(variable, source, wanted))
        if holders != wanted:
            locations.set_ranks(variable, wanted)
            if job.rank not in wanted:
                dropped.append(variable)
    send_values(job, transfers)
    internals.release_variables(dropped, _ADVICE)
    locations.placed_for, locations.release = needs, None
