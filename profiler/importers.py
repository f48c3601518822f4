"""Read profiles that other systems wrote: the graph.txt of PipeDream and DAPPLE."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import naming_file, read_text
from dapple_tf.profiler.topology import runnable_graph

_BATCH = re.compile(r"-pbs-(\d+)")
_EDGE = re.compile(r"(node\d+)\s+--\s+(node\d+)")
_HEAD = re.compile(r"(node\d+)\s+--\s+(.*)")
# A name may contain " -- ", commas, "=" and parentheses: the figures start at the last " -- forward_compute_time=".
_NODE = re.compile(r"(.*)\s--\s+(forward_compute_time\s*=.*)")
_LIST = re.compile(r"\[[^\[\]]*\]")
_END_OF_FIGURE = re.compile(r",|--")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_INPUT = "Input"


@dataclass(frozen=True)
class _Node:
    """A node's line: its number in the file, and the node's name and costs in seconds and bytes."""

    line: int
    cost: LayerCost


def read_profile(path: str | os.PathLike[str], batch_size: int | None = None, size_scale: float = 1.0) -> Profile:
    """Return the profile in a dapple-profile (JSON) or graph.txt file; its content says which it is.

    ``batch_size`` and ``size_scale``: only for graph.txt, see ``read_graph_file``. Raises ProfileError.
    """
    with naming_file(path, ProfileError):
        try:
            text = read_text(path, ProfileError)
        except ProfileError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            model = os.fspath(path) if ":" in os.fspath(path) else "MODEL"
            raise ProfileError(f"{error}; `dapple profile {model} -o profile.json` makes a profile") from error
    graph = " -- " in text or Path(path).suffix != ".json"
    if graph and not text.lstrip().startswith(("{", "[")):
        return read_graph_file(path, batch_size, size_scale)
    if batch_size is not None or size_scale != 1:
        raise ProfileError(f"{path}: batch_size and size_scale are for graph.txt files; a dapple-profile holds its own")
    return Profile.load(path)


def read_graph_file(path: str | os.PathLike[str], batch_size: int | None = None, size_scale: float = 1.0) -> Profile:
    """Return the profile in a graph.txt of PipeDream or DAPPLE.

    Times are in milliseconds and sizes in bytes, for a batch of ``batch_size`` samples (by default the N of ``-pbs-N``
    in the file's name). ``size_scale`` multiplies all sizes (1.048576 for a file that counts MiB as 1e6 bytes). Nodes
    whose name starts with "Input" cost nothing. The file does not say what backward keeps: a layer's output is assumed,
    or nothing if neither direction takes time. Layers keep the file's order where they can run in it, except those that
    read nothing, or only from such layers without cost: these come right before their first reader, so that their
    output crosses as few cuts as possible. A repeated name gets the name of its node as a prefix. Raises ProfileError
    that names the file and the line.
    """
    with naming_file(path, ProfileError):
        name = Path(path).stem
        if batch_size is None:
            found = _BATCH.search(name)
            if not found:
                raise ProfileError(
                    "it is no JSON file of `dapple profile`. If it is a graph.txt of PipeDream or DAPPLE, give the "
                    "batch size of its measurement (--profile-batch-size, in Python batch_size), since its name does "
                    "not contain '-pbs-N'"
                )
            batch_size = int(found[1])
        if not (math.isfinite(size_scale) and size_scale > 0):
            raise ProfileError(f"size_scale is {size_scale}, not a finite number above 0")
        return _build(_BATCH.sub("", name), batch_size, *_parse(read_text(path, ProfileError), size_scale))


def _parse(text: str, size_scale: float) -> tuple[dict[str, _Node], dict[tuple[str, str], int]]:
    """Return the nodes in the file's order, and the first line of each edge."""
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        edge, head = _EDGE.fullmatch(line), _HEAD.fullmatch(line)
        if edge:
            edges.setdefault((edge[1], edge[2]), number)
        elif head:
            node = head[1]
            if node in nodes:
                raise ProfileError(f"line {number}: {node} was already given in line {nodes[node].line}")
            nodes[node] = _parse_node(head[2], number, size_scale)
        elif line:
            raise ProfileError(
                f"line {number}: {quote(line)} is neither 'nodeN -- name -- figures' nor 'nodeN -- nodeM'"
            )
    if not nodes:
        raise ProfileError("the file holds no nodes")
    for (source, target), number in edges.items():
        for node in (source, target):
            if node not in nodes:
                raise ProfileError(f"line {number}: {source} -- {target} names {node}, but no line describes it")
        if source == target:
            raise ProfileError(f"line {number}: {source} -- {target} is an edge from a node to itself")
    return nodes, edges


def _parse_node(text: str, line: int, size_scale: float) -> _Node:
    """Parse a node's line without its ``nodeN -- ``."""
    match = _NODE.fullmatch(text)
    if not match:
        raise ProfileError(f"line {line}: {quote(text)} lacks forward_compute_time; is the file truncated?")
    name, tail = match[1].strip(), match[2]
    given = _split_figures(tail, name, line)
    values = []
    for figure in _FIGURES:
        if figure not in given:
            raise ProfileError(f"line {line}: {quote(name)} lacks {figure}; is the file truncated?")
        values.append(_parse_figure(given[figure], figure, line))
    forward, backward, activation, parameters = values
    if name.startswith(_INPUT):
        return _Node(line, LayerCost(name, 0.0, 0.0, 0.0, 0.0, 0.0))
    activation *= size_scale
    stash = activation if forward or backward else 0.0
    return _Node(line, LayerCost(name, forward / 1e3, backward / 1e3, activation, stash, parameters * size_scale))


def _split_figures(text: str, name: str, line: int) -> dict[str, str]:
    """Return the figures ``key=value``, which end at a comma, at "--" or with the text; a list is one value."""
    masked = _LIST.sub(lambda found: "_" * len(found[0]), text)
    ends = [(found.start(), found.end()) for found in _END_OF_FIGURE.finditer(masked)]
    begins = [0, *(end for _, end in ends)]
    parts = [text[b:e].strip() for b, e in zip(begins, [*(start for start, _ in ends), len(text)], strict=True)]
    given = {}
    for part in parts if parts[-1] else parts[:-1]:
        key, equals, value = map(str.strip, part.partition("="))
        if not equals or not key.isidentifier() or (set("[]") & set(value) and not _LIST.fullmatch(value)):
            raise ProfileError(
                f"line {line}: cannot read {quote(part)} among the figures of {quote(name)}; is the file truncated?"
            )
        given[key] = value
    return given


def _parse_figure(text: str, figure: str, line: int) -> float:
    """Return a number, or the sum of a list of outputs ``[a; b]``."""
    parts = text[1:-1].split(";") if text.startswith("[") and figure == "activation_size" else [text]
    total = 0.0
    for part in map(str.strip, parts):
        value = float(part) if _NUMBER.fullmatch(part) else math.nan
        if not math.isfinite(value) or value < 0:
            raise ProfileError(f"line {line}: {figure} is {quote(text)}, not a finite number of at least 0")
        total += value
    return total


def _build(model: str, batch_size: int, nodes: Mapping[str, _Node], edges: Mapping[tuple[str, str], int]) -> Profile:
    keys = list(nodes)
    index = {key: i for i, key in enumerate(keys)}
    lines = [f"line {nodes[key].line}: {key} {nodes[key].cost.name}" for key in keys]
    graph = runnable_graph(lines, ((index[source], index[target]) for source, target in edges))
    order = _order(graph, [nodes[key].cost for key in keys])
    place = {node: position for position, node in enumerate(order)}
    names = [nodes[key].cost.name for key in keys]
    count = Counter(names)
    layers = []
    for node in order:
        unique = names[node] if names[node] and count[names[node]] == 1 else f"{keys[node]} {names[node]}".strip()
        layers.append(replace(nodes[keys[node]].cost, name=unique))
    joined = sorted((place[source], place[target]) for source, target in graph.edges)
    return Profile(model, batch_size, device="unknown", layers=tuple(layers), edges=tuple(joined))


def _order(graph: nx.DiGraph[int], costs: list[LayerCost]) -> list[int]:
    """Return the nodes in an order in which they can run; see ``read_graph_file``."""
    order = list(nx.lexicographical_topological_sort(graph, key=lambda node: node))
    place = {node: position for position, node in enumerate(order)}
    movable: set[int] = set()  # nodes that can come later at no cost: without inputs, or with free movable inputs only
    for node in order:
        if all(source in movable and _is_free(costs[source]) for source in graph.predecessors(node)):
            movable.add(node)
    slot: dict[int, int] = {}  # the place of a node: that of its first reader that is not movable
    for node in reversed(order):
        readers = [slot[reader] for reader in graph.successors(node)] if node in movable else []
        slot[node] = min(readers, default=place[node])
    # In each slot the one node that is not movable comes last, since it comes last in `order`, too.
    return sorted(order, key=lambda node: (slot[node], place[node]))


def _is_free(cost: LayerCost) -> bool:
    return not (cost.forward_seconds or cost.backward_seconds or cost.activation_bytes or cost.parameter_bytes)
