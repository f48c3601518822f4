"""Notice a training run whose loss becomes NaN or infinite: warn at once, keep good checkpoints, fail at the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.training_loop import StepResult
from dapple_tf.runtime.step import PipelinedStep

_ADVICE = "run with --check-numerics, with which the first such step fails, changes nothing and names the cause"


class LossWatch:
    """Notes the losses of a run of ``step``; ``tell`` prints a line.

    ``problem``: what was wrong with the run, for its end.
    """

    def __init__(self, step: PipelinedStep, ranks: Ranks, tell: Callable[[str], None]) -> None:
        self._step = step
        self._ranks = ranks
        self._tell = tell
        self._first: StepResult | None = None
        self._last: StepResult | None = None
        self._unsaved = 0

    def note(self, done: StepResult) -> None:
        """Note the loss of a step that is done; warn of the first that is not finite."""
        self._last = done
        if not math.isfinite(done.loss) and self._first is None:
            self._first = done
            self._tell(f"warning: the loss of step {done.number} is {done.loss}: to find out why, {_ADVICE}")

    def may_save(self) -> bool:
        """Return whether the run may be saved now: the last loss and the trained variables of all ranks are finite.

        In a job every rank must call it. Of a step whose loss is finite the update may not be.
        """
        last = self._last
        good = last is None or (math.isfinite(last.loss) and not self._find_bad_variables())
        if self._ranks.all_of(good):
            return True
        self._unsaved += 1
        if self._unsaved == 1:
            number = 0 if last is None else last.number
            self._tell(f"warning: no checkpoint after step {number}: the loss or a variable is not finite")
        return False

    @property
    def problem(self) -> str:
        """The message that names the loss or the variables that were not finite; "" where all were finite."""
        if self._first is None and not self._unsaved:
            return ""
        if self._first is None:
            return f"variables became NaN or infinite, and {self._unsaved} checkpoints were not saved: {_ADVICE}"
        kept = "" if not self._unsaved else f"; the checkpoints before are kept, and {self._unsaved} were not saved"
        return f"the loss became {self._first.loss} in step {self._first.number}{kept}. To find out why, {_ADVICE}"

    def _find_bad_variables(self) -> list[str]:
        """Return the names of the trained variables, of those that this rank holds, that are not finite."""
        job = self._ranks.job
        bad = []
        for name, variable in self._step.variables.items():
            holders = None if job is None else job.variable_locations.ranks_of(variable)
            held = job is None or holders is None or job.rank in holders
            checked = held and variable.trainable and variable.dtype.is_floating
            if checked and not bool(tf.reduce_all(tf.math.is_finite(variable))):
                bad.append(name)
        return bad
