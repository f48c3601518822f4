"""A rank holds the variables of its stage, and nothing of the others.

Before a program runs, and as soon as it is built, every rank gets what the program needs there, and drops the rest: its
memory is free, and reading it fails and says what to do, rather than giving a value that other ranks train.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf import internals
from dapple_tf.compiler import StagedModel
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.variable_locations import Needs, holdings
from dapple_tf.distributed.variable_transfer import Transfer, send_values
from graph_passes.analysis.resident_variables import resident_variables
from graph_passes.ir.graph import Graph

_ADVICE = "other ranks of the job hold and train it; call step.gather() on every rank before this"


def find_needs(model: StagedModel, graphs: Sequence[Graph]) -> Needs:
    """What the ranks need whose ``graphs`` these are, by rank."""
    held = [resident_variables(graph) for graph in graphs]
    return Needs(
        tuple(
            (variable, frozenset(rank for rank, names in enumerate(held) if name in names))
            for name, variable in model.variables.items()
        )
    )


def settle(job: Job, needs: Needs, *, anew: bool = False) -> None:
    """Give every rank what it needs and lacks, and have it drop what others need and it does not.

    ``anew``: what several ranks hold is made equal too. A variable that no rank needs stays where it is first held.
    Every rank must call this, with equal needs.
    """
    known = holdings()
    if known.needs is needs and not anew:
        if known.release is None:
            known.release = internals.make_releaser([v for v, _ in needs.ranks if job.rank not in (known.of(v) or ())])
        known.release()
        return
    transfers, dropped = [], []
    for variable, ranks in needs.ranks:
        held, source = known.of(variable), known.source(variable)
        wanted = ranks or frozenset({source})
        if anew or held is None or wanted - held:
            transfers.append(Transfer(variable, source, wanted))
        if held != wanted:
            known.put(variable, wanted)
            if job.rank not in wanted:
                dropped.append(variable)
    send_values(job, transfers)
    internals.release_variables(dropped, _ADVICE)
    known.needs, known.release = needs, None
