"""Build the programs of a pipeline whose devices all belong to this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import ChooseCompiled
from dapple_tf.backend.program import Program, build_program
from dapple_tf.compiler import StepVariant, local_graph
from dapple_tf.plan import Plan
from dapple_tf.staged_model import StagedModel

T = TypeVar("T")


class LocalTarget:
    """Builds programs for ``devices`` (names, indexed by the plan) of one process.

    ``home``: the device of the batch, the loss and everything else that belongs to no stage.
    """

    def __init__(self, devices: Sequence[str], home: str) -> None:
        self._devices = tuple(devices)
        self._home = home
        self._buffers = Buffers(home)

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Do nothing: there are no other processes to tell."""

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns."""
        return work()

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Accept any plan that was ``fitted`` to a smaller batch."""

    def build(
        self,
        model: StagedModel,
        plan: Plan,
        variant: StepVariant,
        times: BuildTimes,
        *,
        local: bool = False,
        choose: ChooseCompiled | None = None,
    ) -> Program:
        """Return the program that runs ``model`` under ``plan``; see ``compiler.local_graph`` for what it raises.

        One process takes all rows of a batch, ``local`` or not. ``choose`` returns the functions that XLA compiles.
        """
        with times.phase("passes"):
            graph = local_graph(model, plan, self._devices, self._home, variant=variant)
        with times.phase("emit"):
            return build_program(graph, model, self._buffers, choose=choose)
