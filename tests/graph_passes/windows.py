"""Whole graphs of asynchronous windows, of any stages, replicas, minibatches and policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import Function, Graph
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.ir.text import parse_type
from dapple_tf.graph_passes.passes.accumulate import Accumulate
from dapple_tf.graph_passes.passes.base import Pass, run_passes
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.gather_slices import SparsePart
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.place import Place
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.rank_variables import RankVariables
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.split_update import Updates
from dapple_tf.graph_passes.passes.windows.group_gradients import GroupGradients
from dapple_tf.graph_passes.passes.windows.order_window import OrderWindow
from dapple_tf.graph_passes.passes.windows.repeat_minibatches import RepeatMinibatches
from dapple_tf.graph_passes.passes.windows.update_groups import UpdateGroups
from dapple_tf.graph_passes.passes.windows.use_versions import UseVersions
from dapple_tf.graph_passes.passes.windows.verify_window import VerifyWindow
from dapple_tf.graph_passes.schedules.weight_versions import Versions, WeightPolicy, weight_versions
from dapple_tf.graph_passes.schedules.window import Window, depth_warm_up, round_robin_warm_up
from tests.graph_passes.builders import call_graph, function

X = "inputs %x\n%x = input() -> (float32[?,4])\n"


@dataclass(frozen=True)
class WindowKind:
    """A window of ``minibatches`` minibatches on stages of ``replicas`` devices.

    ``depth``: in place of the warm-up by workers. ``more``: micro-batches of a minibatch beyond those that "2bw" needs.
    ``frozen``: the stages without trained variables. ``state``: forward counts in stages of one replica, and in the
    others where replicas share micro-batches; ``once``: a state is advanced once a minibatch, from the weights;
    ``sparse``: the first stage looks up rows of ``e``; ``skip``: a tensor goes from the first stage to the last.
    """

    replicas: tuple[int, ...]
    minibatches: int
    policy: WeightPolicy = "stash"
    depth: int | None = None
    more: int = 0
    frozen: frozenset[int] = frozenset()
    state: bool = False
    once: bool = False
    sparse: bool = False
    skip: bool = False

    @cached_property
    def versions(self) -> Versions:
        stages, in_turn = len(self.replicas), self.policy != "2bw"
        warm_up = round_robin_warm_up(self.replicas) if in_turn else tuple(range(stages, 0, -1))
        if self.depth is not None:
            warm_up = depth_warm_up(stages, self.depth)
        count = 1 if in_turn else warm_up[0] + self.more
        return weight_versions(Window(self.minibatches, self.replicas, warm_up, count, in_turn), self.policy)

    @property
    def window(self) -> Window:
        return self.versions.window

    @property
    def trained(self) -> frozenset[str]:
        own = {f"w{stage}" for stage in range(len(self.replicas)) if stage not in self.frozen}
        return frozenset(own | ({"e"} if self.sparse else set()))

    @property
    def parts(self) -> tuple[SparsePart, ...]:
        return (SparsePart("e", 9, 0, 0, 0, "concat"),) if self.sparse else ()

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        ends = [sum(self.replicas[: stage + 1]) for stage in range(len(self.replicas))]
        return tuple(tuple(range(end - r, end)) for end, r in zip(ends, self.replicas, strict=True))

    @property
    def size(self) -> int:
        return sum(self.replicas)

    @property
    def updates(self) -> Updates:
        stages = range(len(self.replicas))
        found = tuple((Site(s), self._update(s)) for s in stages if s not in self.frozen or (self.sparse and not s))
        return Updates(None, found, function("optimizer/after", "variable t"))

    def _update(self, stage: int) -> Function:
        takes, own = [], [f"w{stage}"] * (stage not in self.frozen)
        takes += [f"gradient {name}" for name in own]
        if self.sparse and stage == 0:
            takes.append("slices e float32[_,4], indices e int64[_]")
            own = [*own, "e"]
        return function(f"stage{stage}/update", ", ".join([*takes, *[f"variable {name}" for name in (*own, "t")]]))

    def functions(self, stage: int) -> tuple[Function, ...]:
        """The stage functions of one stage."""
        first, last = stage == 0, stage == len(self.replicas) - 1
        crosses = ["k"] * self.skip
        enters = [] if first else [f"h{stage - 1}", *crosses]
        leaves = [] if last else [f"h{stage}", *crosses]
        weights = [f"w{stage}"] + ["e"] * (self.sparse and first)
        counts = self.state and (self.replicas[stage] == 1 or self.policy == "2bw")
        variables = weights + [f"n{stage}"] * counts
        takes = ["arg x"] * (first or last) + ["once key float32[4]"] * self.once
        takes += [f"boundary {name}" for name in enters] + [f"variable {name}" for name in variables]
        gives = [f"boundary {name}" for name in leaves] + ["loss loss"] * last + ["stash a"]
        graded = [f"variable w{stage}"] * (stage not in self.frozen)
        graded += ["slices e float32[_,4], indices e int64[_]"] * (self.sparse and first)
        seeds = ["seed loss"] if last else [f"gradient {name}" for name in leaves]
        back = [f"gradient {name}" for name in enters]
        once = function(
            f"stage{stage}/run_once",
            f"variable seed{stage}, variable w{stage}",
            "once key float32[4]",
            [f"seed{stage}"],
        )
        return (
            function(f"stage{stage}/forward", ", ".join(takes), ", ".join(gives), [f"n{stage}"] * counts),
            function(
                f"stage{stage}/backward",
                ", ".join([*seeds, "stash a", *[f"variable {name}" for name in weights]]),
                ", ".join([*back, *graded]),
            ),
            *([once] if self.once else []),
        )

    def passes(self) -> list[Pass]:
        """The passes of such a window, in the order of the compiler."""
        devices = tuple(tuple(f"gpu{rank}" for rank in ranks) for ranks in self.ranks)
        return [
            Microbatch(len(self.replicas), self.window.micro_batches),
            *([] if self.window.in_turn else [SplitConcat(self.replicas)]),
            Accumulate(),
            RepeatMinibatches(self.window),
            CopyVariables(self.trained),
            GroupGradients(self.window, self.parts),
            UpdateGroups(self.window, self.updates, "t"),
            UseVersions(self.versions, self.trained),
            OrderWindow(self.versions),
            Place(devices, "home"),
            VerifyWindow(self.versions, self.trained),
        ]

    def input_graph(self) -> Graph:
        """The stage functions, before they are called."""
        return call_graph(X, *(f for stage in range(len(self.replicas)) for f in self.functions(stage)))

    def graph(self) -> Graph:
        """The graph of the window, which has passed ``VerifyWindow``."""
        return run_passes(self.input_graph(), self.passes())

    def rank_graphs(self) -> tuple[Graph, ...]:
        """The graphs of all ranks."""
        whole = self.graph()
        names = {port.name for f in whole.functions for _, port in f.input_ports("variable")}
        whole = RankVariables(tuple((name, parse_type("float32[4]")) for name in names), self.ranks)(whole)
        return tuple(Project(self.ranks, rank)(whole) for rank in range(self.size))


@st.composite
def window_kinds(draw: st.DrawFn, most: Sequence[int] = (3, 4)) -> WindowKind:
    """Any window; ``most``: replicas of a stage, and stages."""
    policy: WeightPolicy = draw(st.sampled_from(["stash", "vertical-sync", "2bw", "latest"]))
    replicas = draw(st.lists(st.integers(1, most[0]), min_size=1, max_size=most[1]))
    if policy == "vertical-sync":
        replicas = [replicas[0]] * len(replicas)
    groups = draw(st.integers(1, 4))
    minibatches = groups if policy == "2bw" else groups * math.lcm(*replicas)
    flags = {name: draw(st.booleans()) for name in ("state", "once", "sparse", "skip")}
    return WindowKind(
        tuple(replicas),
        minibatches,
        policy,
        depth=draw(st.none() | st.integers(1, 7)) if max(replicas) == 1 and policy != "2bw" else None,
        more=draw(st.integers(0, 2)),
        frozen=frozenset(draw(st.sets(st.integers(0, len(replicas) - 1), max_size=len(replicas) - 1))),
        **flags,
    )
