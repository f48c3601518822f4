"""Make the graph of many micro-batches from those of a few, so that the passes need not run for each micro-batch.

In the middle of most schedules every worker repeats a *round* of actions, each time ``stride`` micro-batches later.
``shorten`` leaves out most of these rounds. The passes then run for two short schedules, one of which has a round more,
and ``Lengthening`` adds the rounds that are missing to the first of the two graphs.

A pass makes the nodes of a micro-batch from what stands around its actions in the schedule: those before and after, on
its own worker and on those with which it exchanges tensors. In the middle this is the same for each round, except for
the numbers of micro-batches, for any number of rounds. So an added round has the nodes of the round before it, and the
nodes after it are those of the short graph, all with later numbers; a node without a micro-batch that takes something
from each micro-batch takes it from the added ones too. What is proved of the two graphs (``verify_pipeline``,
``verify_ranks``) thus holds with more rounds: each node has the same nodes around it. ``Lengthening`` does not rely on
the passes alone: one round added to the first graph must give the second one, node by node, or there is no lengthening,
and the passes run for all micro-batches.

The nodes of the result stand in another topological order than those that the passes give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType

from dapple_tf.graph_passes.ir.graph import Attr, Control, Graph, Node, Value, attributes, topological
from dapple_tf.graph_passes.ir.names import MICRO_BATCH, nodes_of, of_any_micro_batch
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule

_LONGEST_STRIDE = 16
_KEPT = 4  # rounds of a short schedule: one is repeated, and the rounds beside it must have its nodes too
_FEWEST = 16  # rounds to leave out: fewer are built as fast as the short graphs


@dataclass(frozen=True)
class Shortened:
    """A schedule from which ``rounds`` of its rounds are left out, ``first``, and ``second``, which has one round more.

    A round has ``stride`` micro-batches; in both schedules one begins with micro-batch ``begin``.
    """

    first: Schedule
    second: Schedule
    rounds: int
    begin: int
    stride: int


def shorten(schedule: Schedule, fewest: int = _FEWEST) -> Shortened | None:
    """Return the schedule without most of its rounds; None if fewer than ``fewest`` can be left out."""
    for stride in range(1, _LONGEST_STRIDE + 1):
        found = [_find_rounds(schedule, actions, stride) for actions in schedule.workers]
        rounds = [each for each in found if each is not None]
        if len(rounds) < len(found):
            continue
        begin, end = max(each.begin for each in rounds), min(each.end for each in rounds)
        left_out = (end - begin) // stride - _KEPT
        if left_out >= fewest:
            first, second = (_leave_out(schedule, rounds, count, stride) for count in (left_out, left_out - 1))
            return Shortened(first, second, left_out, begin + stride, stride)
    return None


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a worker: the first begins with its action number ``place``, and each has ``length`` actions.

    The rounds have the actions of each stage and kind on the micro-batches from ``begin`` to ``end`` - 1.
    """

    place: int
    length: int
    begin: int
    end: int


def _find_rounds(schedule: Schedule, actions: Sequence[Action], stride: int) -> _Rounds | None:
    """Return the rounds in the middle of a worker's actions; None unless each stage and kind is in micro-batch order.

    With this order, the rounds have consecutive micro-batches of each stage and kind.
    """
    place = end = len(actions) // 2
    following = _renumber(actions[place], stride)
    later = actions[place + 1 :]  # micro-batches may also run in descending order
    if following not in later:
        return None
    length = later.index(following) + 1

    def repeats(i: int) -> bool:
        one, two = actions[i], actions[i + length]
        same = (one.stage, one.kind, one.micro_batch + stride) == (two.stage, two.kind, two.micro_batch)
        return same and (one in schedule.together) == (two in schedule.together)

    while end + length < len(actions) and repeats(end):
        end += 1
    while place and repeats(place - 1):
        place -= 1
    every, inside = (_numbers(found) for found in (actions, actions[place : end + length]))
    if inside.keys() != every.keys() or any(list(numbers) != sorted(numbers) for numbers in every.values()):
        return None
    firsts, lasts = zip(*((numbers[0], numbers[-1]) for numbers in inside.values()), strict=True)
    return _Rounds(place, length, max(firsts), min(lasts) + 1)


def _numbers(actions: Iterable[Action]) -> Mapping[tuple[int, str], list[int]]:
    """Return the micro-batches of each stage and kind, in order."""
    found: dict[tuple[int, str], list[int]] = {}
    for action in actions:
        found.setdefault((action.stage, action.kind), []).append(action.micro_batch)
    return found


def _leave_out(schedule: Schedule, rounds: Sequence[_Rounds], count: int, stride: int) -> Schedule:
    """Return the schedule without ``count`` rounds of each worker."""
    workers, together = [], set()
    for actions, found in zip(schedule.workers, rounds, strict=True):
        after = found.place + count * found.length
        left = [(action, action) for action in actions[: found.place]]
        left += [(action, _renumber(action, -count * stride)) for action in actions[after:]]
        workers.append(tuple(new for _, new in left))
        together |= {new for old, new in left if old in schedule.together}
    return Schedule(tuple(workers), frozenset(together))


def _renumber(action: Action, by: int) -> Action:
    """Return the action on the micro-batch whose number is higher by ``by``."""
    return Action(action.stage, action.kind, action.micro_batch + by)


def find_received(graphs: Sequence[Graph], graph: Graph, rank: int) -> Mapping[str, Sequence[int]]:
    """Return the micro-batch of each output of those exchanges of a rank that are not for one micro-batch; -1 for none.

    ``graph``: the graph of the rank; ``graphs``: the graphs of all ranks.
    """
    found = {}
    for node in nodes_of(graph, OpName.EXCHANGE):
        if not node.has(MICRO_BATCH):
            sent = {source: _sent(graphs[source], node.name, rank) for source in node.integers("source")}
            found[node.name] = [*(next(sent[source]) for source in node.integers("source")), -1]  # then a token
    return found


def _sent(graph: Graph, name: str, to: int) -> Iterator[int]:
    """Yield the micro-batch of each value that the exchange ``name`` sends to the rank ``to``; -1 for none."""
    node = graph.node(name)
    for value, receiver in zip(node.inputs, node.integers("to"), strict=True):
        if receiver == to:
            source = graph.node(value.node)
            yield source.get(MICRO_BATCH, -1)


class _UnlikeError(Exception):
    """The second graph is not the first one with a round more."""


class Lengthening:
    """The graphs of the two schedules of a ``Shortened``, the second of which is the first one with a round more.

    ``sizes``: the samples of each micro-batch, where these are given; the two graphs have the first of them.
    ``received``: see ``find_received``.
    """

    @staticmethod
    def find(
        first: Graph,
        second: Graph,
        short: Shortened,
        sizes: tuple[int, ...] = (),
        received: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> Lengthening | None:
        """Return the lengthening of two graphs; None if one round added to ``first`` does not give ``second``."""
        try:
            found = Lengthening(first, second, short, sizes, received)
            longer = found._add(1)
        except _UnlikeError:
            return None
        same = longer.by_name == second.by_name and longer.replace(nodes=()) == second.replace(nodes=())
        return found if same else None

    def __init__(
        self,
        first: Graph,
        second: Graph,
        short: Shortened,
        sizes: tuple[int, ...],
        received: Mapping[str, Sequence[int]],
    ) -> None:
        self._first, self._second, self._short = first, second, short
        self._sizes, self._received = sizes, received
        self._numbers = {node.name: node.integer(MICRO_BATCH) for node in _numbered(first)}
        self._patterns: dict[str, _Pattern] = {}
        kinds = {(of_any_micro_batch(node), node.integer(MICRO_BATCH)): node for node in _numbered(second)}
        for node in _numbered(first):
            number = self._numbers[node.name]
            if number >= short.begin:
                self._compare(node, kinds.get((of_any_micro_batch(node), number + short.stride)))

    def whole(self) -> Graph:
        """Return the graph of all rounds."""
        return self._add(self._short.rounds)

    def _compare(self, node: Node, later: Node | None) -> None:
        """Store the patterns of the names and reasons of a node; ``later``: the second graph's node a round later."""
        texts, others = list(_texts(node)), [] if later is None else list(_texts(later))
        if len(texts) != len(others):
            raise _UnlikeError
        for text, other in zip(texts, others, strict=True):
            pattern = _find_pattern(text, other, self._short.stride)
            if self._patterns.setdefault(text, pattern) != pattern:
                raise _UnlikeError

    def _add(self, rounds: int) -> Graph:
        """Return the first graph with more rounds."""
        short = self._short
        count = short.first.micro_batches + rounds * short.stride
        cut: dict[str, Attr] = {"micro_batches": count, "sizes": self._sizes[:count]}
        added = _Added(rounds, [_Later(self._patterns, i * short.stride) for i in range(rounds + 1)])
        for name, numbers in self._received.items():
            added.outputs[name] = {place: i for i, place in enumerate(self._repeat(numbers, rounds))}
        early: list[Node] = []
        repeated: list[Node] = []
        late: list[Node] = []
        for node in self._first.nodes:
            number = self._numbers.get(node.name)
            if number is None:
                (late if repeated else early).append(self._take_more(node, added))
                continue
            node = replace(node, attrs=tuple((key, cut.get(key, value)) for key, value in node.attrs))
            if number < short.begin:
                early.append(node)
            elif number < short.begin + short.stride:
                repeated.append(node)
            else:
                late.append(added.later[-1].shift(node))
        rest = [later.shift(node) for later in added.later for node in repeated]
        return self._first.replace(nodes=topological([*early, *rest, *late]))

    def _take_more(self, node: Node, added: _Added) -> Node:
        """Return the node that replaces ``node``, which belongs to no micro-batch, in the graph with more rounds."""
        other = self._second.by_name.get(node.name)
        if other is None or len(node.attrs) != len(other.attrs):
            raise _UnlikeError
        taken = self._repeat([self._number(value) for value in node.inputs], added.rounds)
        waits = self._repeat([self._numbers.get(control.source, -1) for control in node.controls], added.rounds)
        given = list(added.outputs.get(node.name, [(i, 0) for i in range(len(node.outputs))]))

        def attribute(key: str, one: Attr, two: Attr) -> Attr:
            if node.op == OpName.EXCHANGE and key in ("to", "source"):  # an item for each input or output
                ranks, places = node.integers(key), taken if key == "to" else given[:-1]  # the last is a token
                return tuple(ranks[i] for i, _ in places)
            return _extrapolate(one, two, added.rounds)

        return replace(
            node,
            inputs=tuple(added.find(node.inputs[i], k) for i, k in taken),
            outputs=tuple(node.outputs[i] for i, _ in given),
            controls=tuple(Control(added.later[k][node.controls[i].source], node.controls[i].reason) for i, k in waits),
            attrs=tuple(
                (key, attribute(key, one, two)) for (key, one), (_, two) in zip(node.attrs, other.attrs, strict=True)
            ),
        )

    def _number(self, value: Value) -> int:
        """Return the micro-batch of a value; -1 for none."""
        received = self._received.get(value.node)
        return self._numbers.get(value.node, -1) if received is None else received[value.index]

    def _repeat(self, numbers: Sequence[int], rounds: int) -> list[_Place]:
        """Return the items that there are with more rounds, each as the place of the item that it repeats.

        ``numbers``: the micro-batch of each item of the first graph, or -1. Neighbouring items that are repeated are
        repeated as a group.
        """
        begin, end = self._short.begin, self._short.begin + self._short.stride
        found: list[_Place] = []
        for part, group in groupby(range(len(numbers)), lambda i: (numbers[i] >= begin) + (numbers[i] >= end)):
            items = list(group)
            found += [(i, k) for k in ([0], range(rounds + 1), [rounds])[part] for i in items]
        return found


_Place = tuple[int, int]
"""The place of an item in the first graph, and how many rounds later it is."""


@dataclass
class _Added:
    """The changes of names where ``rounds`` are added: ``later[i]`` maps each name to the one i rounds later.

    ``outputs``: for exchanges with outputs of several micro-batches, the number of the output that stands for a place.
    """

    rounds: int
    later: Sequence[_Later]
    outputs: dict[str, dict[_Place, int]] = field(default_factory=dict)

    def find(self, value: Value, rounds: int) -> Value:
        """Return a value as it is some rounds later."""
        if value.node in self.outputs:
            return Value(value.node, self.outputs[value.node][value.index, rounds])
        return Value(self.later[rounds][value.node], value.index)


class _Later(dict[str, str]):
    """Maps names and reasons of the first graph to those of the micro-batches whose numbers are higher by ``by``."""

    def __init__(self, patterns: Mapping[str, _Pattern], by: int) -> None:
        super().__init__()
        self._patterns, self._by = patterns, by

    def __missing__(self, text: str) -> str:
        if not self._by:
            return text
        pattern, numbers = self._patterns[text]
        self[text] = found = pattern % tuple([number + self._by for number in numbers])
        return found

    def shift(self, node: Node) -> Node:
        """Return the node of the later micro-batch that corresponds to ``node``."""
        return Node(
            self[node.name],
            node.op,
            tuple([Value(self[value.node], value.index) for value in node.inputs]),
            node.outputs,
            attributes({**dict(node.attrs), MICRO_BATCH: node.integer(MICRO_BATCH) + self._by}),
            tuple([Control(self[control.source], self[control.reason]) for control in node.controls]),
            node.effect,
            node.device,
        )


_Pattern = tuple[str, tuple[int, ...]]
"""A text with ``%d`` in place of each number of a micro-batch, and these numbers."""


def _find_pattern(text: str, later: str, stride: int) -> _Pattern:
    """Return the pattern of a text; ``later``: the corresponding text for micro-batches that are ``stride`` later."""
    parts, others = (re.split(r"(\d+)", each) for each in (text, later))
    if len(parts) != len(others):
        raise _UnlikeError
    numbers: list[int] = []
    for i, (part, other) in enumerate(zip(parts, others, strict=True)):
        if part != other:
            if not i % 2 or int(other) - int(part) != stride:
                raise _UnlikeError
            numbers.append(int(part))
        parts[i] = part.replace("%", "%%") if part == other else "%d"
    return "".join(parts), tuple(numbers)


def _numbered(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.has(MICRO_BATCH))


def _texts(node: Node) -> Iterator[str]:
    yield node.name
    yield from node.predecessors()
    yield from (control.reason for control in node.controls)


def _extrapolate(one: Attr, two: Attr, rounds: int) -> Attr:
    """Return the value that an attribute has with ``rounds`` more rounds: ``one`` with none, ``two`` with one."""
    if one == two:
        return one
    if isinstance(one, int) and isinstance(two, int):
        return one + rounds * (two - one)
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return tuple(_extrapolate(a, b, rounds) for a, b in zip(one, two, strict=True))
    raise _UnlikeError
