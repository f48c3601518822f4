"""The actions of one worker, written down without numbers of micro-batches: each stage counts its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graph_passes.schedules.schedule import Action, Kind


@dataclass
class CallSequence:
    """Collects ``actions``: the n-th F of a stage is on micro-batch n, and so is its n-th B or I, counted together."""

    actions: list[Action] = field(default_factory=list)
    _ran: Counter[tuple[int, str]] = field(default_factory=Counter)
    _waiting: list[Action] = field(default_factory=list)  # the W of each I that has run, the oldest first

    def repeat(self, times: int, *calls: tuple[int, Kind]) -> None:
        """Append the calls, each a stage and a kind of action, ``times`` times. A W is the oldest of its stage."""
        for _ in range(times):
            for stage, kind in calls:
                if kind == "W":
                    self._append_weights(next(action for action in self._waiting if action.stage == stage))
                else:
                    self._append(stage, kind)

    def append_oldest_weights(self) -> None:
        """Append the W of the I that ran first among those whose W has not run."""
        self._append_weights(self._waiting[0])

    def append_remaining_weights(self) -> None:
        """Append all W that have not run, the oldest first."""
        while self._waiting:
            self.append_oldest_weights()

    def _append(self, stage: int, kind: Kind) -> None:
        counted = stage, "forward" if kind == "F" else "backward"
        m = self._ran[counted]
        self._ran[counted] += 1
        self.actions.append(Action(stage, kind, m))
        if kind == "I":
            self._waiting.append(Action(stage, "W", m))

    def _append_weights(self, action: Action) -> None:
        self._waiting.remove(action)
        self.actions.append(action)
