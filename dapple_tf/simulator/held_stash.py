"""The stashes that workers hold at once, from an order alone: a forward adds one, B or W frees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.order import FORWARD, INPUTS, KIND_MASK, KIND_SHIFT, NONE, STAGE_SHIFT, Order


@dataclass(frozen=True, eq=False)
class HeldStash:
    """By how many each action of an order changes the stashes held, and its stage: [workers, actions]."""

    changes: Integers
    stages: Integers
    worker_of: Integers

    @staticmethod
    def of(order: Order) -> HeldStash:
        """Return the changes of an order."""
        kinds, is_action = (order.actions >> KIND_SHIFT) & KIND_MASK, order.actions != NONE
        frees = is_action & (kinds != FORWARD) & (kinds != INPUTS)
        changes = (is_action & (kinds == FORWARD)).astype(np.int64) - frees
        return HeldStash(changes, np.maximum(order.actions, 0) >> STAGE_SHIFT, order.worker_of)

    def in_flight(self) -> Integers:
        """Return the most micro-batches that each stage has in flight at once."""
        rows = (np.where(self.stages == s, self.changes, 0).cumsum(axis=1) for s in range(len(self.worker_of)))
        return np.array([row.max() for row in rows], np.int64)

    def peaks(self, fixed: Floats, stash: Floats, working: Floats) -> Floats:
        """Return the most bytes that a device of each worker holds.

        That is the ``fixed`` bytes of its stages, the largest ``working`` bytes of one of them, and the most ``stash``
        bytes in flight. The arguments are bytes of each stage, on one device.
        """
        held = np.maximum(0.0, (self.changes * stash[self.stages]).cumsum(axis=1).max(axis=1))
        largest = np.zeros(len(held))
        np.maximum.at(largest, self.worker_of, working)
        return held + np.bincount(self.worker_of, fixed, len(held)) + largest
