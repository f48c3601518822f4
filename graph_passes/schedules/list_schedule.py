"""List scheduling: a worker that is free starts the action that has the highest priority among those that are ready.

The method of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 4, for any worker map: backwards come first,
then forwards as far as memory allows, and gradients of weights fill the time in which a worker would wait. The order is
found by simulating the step with the seconds of each action and transfer.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, check, of_kind
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a micro-batch's actions and transfers on a stage, and its ``stash`` in bytes (or any unit).

    ``backward``: seconds of the whole backward, including ``weights``, the seconds of the gradients of weights.
    ``send_forward`` and ``send_backward``: seconds of a transfer to the next stage, and of one from it; between stages
    on one worker nothing is sent.
    """

    forward: float = 1.0
    backward: float = 2.0
    weights: float = 1.0
    send_forward: float = 0.0
    send_backward: float = 0.0
    stash: float = 1.0

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of an action of this kind."""
        return of_kind(kind, self.forward, self.backward, self.weights)


@dataclass(frozen=True)
class ListRule:
    """The priorities and limits by which a worker chooses one of the actions that are ready.

    ``split``: whether a backward is the two actions I and W, and not one B. ``most``: the most stash that each worker
    may hold, in the unit of ``StageTimes.stash``. ``alternate``: whether a worker that has just run a backward prefers
    a forward to another backward, if one is ready. ``wait_share``: a worker does not start a W if a result will arrive
    within this share of the W's seconds.
    """

    split: bool
    most: tuple[float, ...]
    alternate: bool = False
    wait_share: float = 0.0

    @property
    def backward(self) -> Kind:
        """The kind of action that gives the gradients of a stage's inputs."""
        return "I" if self.split else "B"


def list_schedule(
    worker_map: WorkerMap, micro_batches: int, times: Sequence[StageTimes], rule: ListRule
) -> Schedule | None:
    """Return the schedule that follows from the rule; None where its limits prevent an action from ever running.

    ``times``: an entry for each stage. The forwards and the backwards of a stage run in micro-batch order.
    """
    workers = [_Worker(stages, micro_batches, times, rule, w) for w, stages in enumerate(worker_map.stages_of)]
    worker_of, last = worker_map.worker_of, worker_map.stages - 1
    channel_free: dict[tuple[int, int], float] = {}
    events = [(0.0, w) for w in range(worker_map.workers)]
    for m in range(micro_batches):
        workers[worker_of[0]].receive(0.0, Action(0, "F", m))
    while events:
        now, w = heapq.heappop(events)
        action = workers[w].choose(now)
        if action is None:
            continue
        end = workers[w].run(action, now)
        heapq.heappush(events, (end, w))
        stage, m = action.stage, action.micro_batch
        if action.kind == "W":
            continue
        step = 1 if action.kind == "F" else -1
        target = stage + step
        if action.kind == "F" and stage == last:
            workers[w].receive(end, Action(stage, rule.backward, m))
        if not 0 <= target <= last:
            continue
        arrival = end
        if worker_of[target] != w:
            boundary = times[min(stage, target)]
            seconds = boundary.send_forward if step == 1 else boundary.send_backward
            arrival = max(end, channel_free.get((stage, step), 0.0)) + seconds
            channel_free[stage, step] = arrival
        workers[worker_of[target]].receive(arrival, Action(target, "F" if step == 1 else rule.backward, m))
        heapq.heappush(events, (arrival, worker_of[target]))
    if any(len(worker.actions) < worker.count for worker in workers):
        return None
    return Schedule(tuple(tuple(worker.actions) for worker in workers))


def list_equal_stages(worker_map: WorkerMap, micro_batches: int, rule: ListRule) -> Schedule:
    """Return the schedule of stages that take equally long, with a backward twice as long as a forward.

    Raises ScheduleError if the limits of the rule leave no room for one micro-batch on all stages of a worker.
    """
    schedule = list_schedule(worker_map, micro_batches, [StageTimes()] * worker_map.stages, rule)
    if schedule is None:
        raise ScheduleError(f"a worker has room for {min(rule.most):g} stashes, and one micro-batch needs more")
    check(schedule)
    return schedule


@dataclass
class _Worker:
    """The state of one worker: what it has run, and what it may run next."""

    stages: Sequence[int]
    micro_batches: int
    times: Sequence[StageTimes]
    rule: ListRule
    index: int
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = 0.0
        self.held = 0.0
        self.arrivals: list[tuple[float, Action]] = []  # a heap of actions, each with the time from which it is ready
        self.forwards: dict[int, deque[int]] = {stage: deque() for stage in reversed(self.stages)}
        self.backwards: list[tuple[int, int]] = []  # a heap of (micro-batch, -stage)
        self.weights: deque[tuple[int, int]] = deque()
        self.ended: Counter[int] = Counter()  # stages of each micro-batch whose stash is free again
        self.whole = sum(self.times[stage].stash for stage in self.stages)  # stash of a micro-batch on all stages
        # For each micro-batch in flight, the oldest first: the stash that it will still need, and the stash it holds.
        self.in_flight: dict[int, tuple[float, float]] = {}

    @property
    def count(self) -> int:
        """The number of actions of a whole step."""
        return len(self.stages) * self.micro_batches * (3 if self.rule.split else 2)

    def receive(self, time: float, action: Action) -> None:
        """Record that the results that ``action`` takes arrive at ``time``."""
        heapq.heappush(self.arrivals, (time, action))

    def choose(self, now: float) -> Action | None:
        """Return the action to start now; None where the worker is busy or waits."""
        if now < self.free:
            return None
        while self.arrivals and self.arrivals[0][0] <= now:
            _, action = heapq.heappop(self.arrivals)
            if action.kind == "F":
                self.forwards[action.stage].append(action.micro_batch)
            else:
                heapq.heappush(self.backwards, (action.micro_batch, -action.stage))
        forward = next(
            (
                Action(stage, "F", waiting[0])
                for stage, waiting in self.forwards.items()
                if waiting and self._admits(stage, waiting[0])
            ),
            None,
        )
        forward_next = self.rule.alternate and bool(self.actions) and self.actions[-1].kind in ("B", "I")
        if self.backwards and not (forward_next and forward):
            m, negative = self.backwards[0]
            return Action(-negative, self.rule.backward, m)
        return forward or self._choose_weights(now)

    def _choose_weights(self, now: float) -> Action | None:
        """Return the oldest W, or None if there is none or a result will arrive soon (see ``ListRule.wait_share``)."""
        if not self.weights:
            return None
        stage, m = self.weights[0]
        wait_share = self.rule.wait_share * self.times[stage].weights
        if self.arrivals and self.arrivals[0][0] < now + wait_share:
            return None
        return Action(stage, "W", m)

    def run(self, action: Action, now: float) -> float:
        """Start an action that ``choose`` returned; return when it ends."""
        self.actions.append(action)
        stage, m = action.stage, action.micro_batch
        if action.kind == "F":
            self.forwards[stage].popleft()
            rest, held = self.in_flight.get(m, (self.whole, 0.0))
            self.in_flight[m] = rest - self.times[stage].stash, held + self.times[stage].stash
            self.held += self.times[stage].stash
        elif action.kind == "W":
            self.weights.popleft()
        else:
            heapq.heappop(self.backwards)
        if action.kind == "I":
            self.weights.append((stage, m))
        elif action.kind != "F":
            rest, held = self.in_flight[m]
            self.in_flight[m] = rest, held - self.times[stage].stash
            self.held -= self.times[stage].stash
            self.ended[m] += 1
            if self.ended[m] == len(self.stages):
                del self.in_flight[m]
        self.free = now + self.times[stage].seconds(action.kind)
        return self.free

    def _admits(self, stage: int, m: int) -> bool:
        """Return whether a forward may run: with it, the micro-batches in flight can still end one after the other.

        This is the banker's algorithm. Each micro-batch needs memory for its later stages on this worker, and returns
        all that it holds when it ends.
        """
        most, own = self.rule.most[self.index] * (1 + 1e-12), self.times[stage].stash
        held = self.held + own
        if len(self.stages) == 1 or held > most:
            return held <= most
        before = self.in_flight.get(m, (self.whole, 0.0))
        for rest, kept in (self.in_flight | {m: (before[0] - own, before[1] + own)}).values():
            if held + rest > most:
                return False
            held -= kept
        return True
