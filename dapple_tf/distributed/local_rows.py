"""Check that the rows that the ranks of a job were given are the rows of one batch; find its size and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.shared_errors import share_error
from dapple_tf.errors import BatchError
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds, Use, count_rows, describe_rows
from dapple_tf.profiler.units import format_samples
from dapple_tf.wording import format_count

MISSING = -1
"""Stands for a number of rows, or for a length, if the argument is None."""

LengthAxis = tuple[str, int]
"""The path of an argument, and one of its axes, whose length was unknown when the step was built."""

_REFUSED = -2  # stands for every number of a rank whose arguments are no local batch


@dataclass(frozen=True)
class GivenRows:
    """The sizes of the arguments that a rank was given, ``MISSING`` for an argument that it was not given.

    ``rows``: the number of rows of each flattened argument. ``lengths``: the length of each ``LengthAxis``.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]


def agree_on_size(
    job: Job, needs: Sequence[InputNeeds], given: GivenRows | BatchError, axes: Sequence[LengthAxis]
) -> tuple[int, list[int]]:
    """Return the number of samples of the whole batch, and the length of each of the ``axes``.

    ``needs``: the needs of all ranks. ``given``: the sizes that this rank was given, or why its arguments are refused.
    A length is ``MISSING`` where no rank has the argument. Every rank must call this. If a rank was given other rows
    than it needs, or two ranks have different lengths, all ranks raise a BatchError that names the ranks and the
    argument.
    """
    count = len(needs[job.rank].arguments)
    refusal = [_REFUSED] * (count + len(axes))
    own = refusal if isinstance(given, BatchError) else [*given.rows, *given.lengths]
    found = job.gather_integers("compare the rows of the batch", own)
    if any(_REFUSED in numbers for numbers in found):
        texts = job.gather(str(given) if isinstance(given, BatchError) else "")
        refused = [rank for rank, text in enumerate(texts) if text]
        raise share_error(BatchError("; ".join(f"rank {rank}: {texts[rank]}" for rank in refused)), refused[0])
    try:
        samples = find_size(needs, [numbers[:count] for numbers in found])
        return samples, find_lengths(axes, [numbers[count:] for numbers in found])
    except BatchError as error:
        raise share_error(error, 0) from None


def find_size(needs: Sequence[InputNeeds], given: Sequence[Sequence[int]]) -> int:
    """Return the number of samples of the batch; ``given``: for each rank the number of rows of each argument.

    Rows of arguments that a rank does not need do not count. Raises BatchError if a rank has too few or too many rows.
    """
    missing = [
        f"rank {rank} was given None for argument {name}, but it needs {_expected(own, name)}"
        for rank, own in enumerate(needs)
        for i, name in enumerate(own.arguments)
        if own.inputs.uses[i] is not Use.NONE and given[rank][i] == MISSING
    ]
    if missing:
        raise BatchError("; ".join(missing))
    sizes = _batch_sizes(needs, given)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} of {what}" for what, size in sizes.items())
        raise BatchError(f"the ranks were not given rows of one batch, but {listed}: see step.needs.rows(batch size)")
    size = next(iter(sizes.values()), 0)
    if not size:
        raise BatchError("the ranks were given no rows: the batch is empty, or the loss uses no argument of it")
    _check_shares(needs, given, size)
    return size


def find_lengths(axes: Sequence[LengthAxis], given: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of each axis, ``MISSING`` where no rank has the argument; ``given``: the lengths of each rank.

    Raises BatchError if two ranks differ.
    """
    found = []
    for i, (argument, axis) in enumerate(axes):
        ranks = {numbers[i]: rank for rank, numbers in reversed(list(enumerate(given))) if numbers[i] != MISSING}
        if len(ranks) > 1:
            listed = ", ".join(f"{length} on rank {rank}" for length, rank in reversed(ranks.items()))
            what = f"axis {axis} of argument {argument} has the length {listed}"
            raise BatchError(f"the ranks were not given rows of one batch: {what}")
        found.append(next(iter(ranks), MISSING))
    return found


def _batch_sizes(needs: Sequence[InputNeeds], given: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return each batch size that follows from the rows of some ranks, by a text that names argument and ranks."""
    found: dict[str, int] = {}
    for i, name in enumerate(needs[0].arguments):
        of_worker: dict[tuple[int, ...], list[int]] = {}
        for rank, own in enumerate(needs):
            if own.inputs.uses[i] is Use.ALL:
                found[f"argument {name} on rank {rank}"] = given[rank][i]
            of_worker.setdefault(own.inputs.stages, []).append(rank)
        for ranks in of_worker.values():
            if all(needs[rank].inputs.uses[i] is Use.OWN for rank in ranks):
                on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks} together"
                found[f"argument {name} on {on}"] = sum(given[rank][i] for rank in ranks)
    return found


def _check_shares(needs: Sequence[InputNeeds], given: Sequence[Sequence[int]], size: int) -> None:
    """Raise BatchError unless every rank has as many rows of a batch of ``size`` samples as it needs."""
    wrong = []
    for rank, own in enumerate(needs):
        for i, (name, rows) in enumerate(own.rows(size).items()):
            if rows and given[rank][i] != count_rows(rows):
                text = f"{format_count(given[rank][i], 'row')} of argument {name}, and needs {count_rows(rows)}"
                wrong.append(f"rank {rank} was given {text} ({describe_rows(rows, size)})")
    if wrong:
        raise BatchError(f"of a batch of {format_samples(size)} {'; '.join(wrong)}: see step.needs.rows({size})")


def _expected(needs: InputNeeds, name: str) -> str:
    """Return which rows the rank needs of a batch of the size for which a step was built last."""
    return f"{describe_rows(needs.rows()[name], needs.batch_size)} of a batch of {format_samples(needs.batch_size)}"
