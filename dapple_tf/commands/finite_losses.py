"""Notice a training run whose loss becomes NaN or infinite: warn at once, keep good checkpoints, fail at the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.training_loop import StepResult
from dapple_tf.runtime.step import PipelinedStep

_ADVICE = "run with --check-numerics, with which the first such step fails, changes nothing and names the cause"
_WINDOW_ADVICE = "train on from a good checkpoint without --async and with --check-numerics, which names the cause"


class LossWatch:
    """Notes the losses of a run of ``step``; ``tell`` prints a line.

    ``problem``: what was wrong with the run, for its end. ``minibatch_losses``: of each asynchronous window.
    """

    def __init__(self, step: PipelinedStep, ranks: Ranks, tell: Callable[[str], None]) -> None:
        self._step = step
        self._ranks = ranks
        self._tell = tell
        self._first: StepResult | None = None
        self._bad_minibatch = 0
        self._last: StepResult | None = None
        self._unsaved = 0
        self.minibatch_losses: list[list[float]] = []

    def note(self, done: StepResult) -> None:
        """Note the loss of a step that is done; warn of the first that is not finite."""
        self._last = done
        if self._in_windows:
            self.minibatch_losses.append(self._step.losses.numpy().tolist())
        if not math.isfinite(done.loss) and self._first is None:
            self._first = done
            self._bad_minibatch = self._find_bad_minibatch()
            self._tell(f"warning: the loss of {self._place(done)} is {done.loss}: to find out why, {self._advice}")

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
            what = "window" if self._in_windows else "step"
            self._tell(f"warning: no checkpoint after {what} {number}: the loss or a variable is not finite")
        return False

    @property
    def problem(self) -> str:
        """The message that names the loss or the variables that were not finite; "" where all were finite."""
        if self._first is None and not self._unsaved:
            return ""
        if self._first is None:
            return f"variables became NaN or infinite, and {self._unsaved} checkpoints were not saved: {self._advice}"
        kept = "" if not self._unsaved else f"; the checkpoints before are kept, and {self._unsaved} were not saved"
        place = self._place(self._first)
        return f"the loss became {self._first.loss} in {place}{kept}. To find out why, {self._advice}"

    @property
    def _in_windows(self) -> bool:
        return self._step.plan.window is not None

    @property
    def _advice(self) -> str:
        return _WINDOW_ADVICE if self._in_windows else _ADVICE

    def _place(self, done: StepResult) -> str:
        """Return which step, or which minibatch of which window, had the first loss that was not finite."""
        if not self._in_windows:
            return f"step {done.number}"
        return f"minibatch {self._bad_minibatch} of window {done.number}"

    def _find_bad_minibatch(self) -> int:
        """Return the first minibatch of the last window whose loss is not finite; 0 in a synchronous step."""
        losses = self.minibatch_losses[-1] if self._in_windows else []
        return next((m for m, loss in enumerate(losses) if not math.isfinite(loss)), 0)

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
