"""Drawings of a plan as SVG: its layers in stages, and the devices of each stage on their servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dapple_tf.wording import format_count

_WIDE = 900.0  # pixels, of the layers and of a line of servers
_LETTER = 5.6  # pixels, of a text of 11 pixels
_LAYER = 40.0  # height of the layers
_GAP = 12.0
# The largest number of devices, and the width and height in pixels of each.
_BOXES = ((64, (98.0, 36.0)), (256, (30.0, 20.0)), (10**9, (9.0, 9.0)))
_MOST_SEPARATE = 200  # layers that are drawn one by one


@dataclass(frozen=True)
class DrawnStage:
    """A stage with layers ``first`` to ``last`` (inclusive), and the rows of a micro-batch on each of its devices.

    ``worker``: the virtual worker that the stage belongs to; each has all layers.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    rows: tuple[float, ...]
    worker: int = 0


@dataclass(frozen=True)
class DrawnServer:
    """A server, its devices by number, and the kind of each; no kinds where all are alike."""

    name: str
    devices: tuple[int, ...]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanDrawing:
    """The parts of a plan's drawing; the drawing of a cluster alone has no ``stages``.

    ``layers``: the names of all layers; empty where they are not known. ``seconds``: those that each layer computes, in
    proportion to which it is drawn; empty for layers of one width. ``recomputed``: numbers of layers. ``notes``: lines
    below, such as the speed of the links.
    """

    stages: tuple[DrawnStage, ...] = ()
    servers: tuple[DrawnServer, ...] = ()
    layers: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    recomputed: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return max((stage.last + 1 for stage in self.stages), default=0)


def series_colour(index: int, count: int) -> str:
    """Return the colour of one of ``count`` things in a row: from blue over green to orange, on light and on dark."""
    return f"hsl({220 - 190 * index / max(1, count - 1):.0f} 65% 50%)"


def draw_plan(plan: PlanDrawing) -> str:
    """Return the drawing: the layers above, as wide as they compute long, and the servers below."""
    parts, top = list[str](), 0.0
    if plan.stages:
        what = "layers, as wide as they compute long" if plan.seconds else "layers"
        parts.append(_text(0, 12, f"{what}{'; a bar below: re-computed' if plan.recomputed else ''}", "faint"))
        top = 18.0
    workers = dict.fromkeys(stage.worker for stage in plan.stages)
    for worker in workers:
        parts += _draw_layers(plan, worker, top)
        top += _LAYER + _GAP
    below, top = _draw_servers(plan, top + (_GAP if plan.stages else 0.0))
    parts += below
    for note in plan.notes:
        top += 16
        parts.append(_text(0, top, note, "faint"))
    inside = "\n".join(parts)
    size = f'width="{_WIDE + 2:g}" height="{top + 6:g}" viewBox="-1 0 {_WIDE + 2:g} {top + 6:g}"'
    return f'<svg class="plan" {size}>\n{inside}\n</svg>'


PLAN_STYLE = """\
svg.plan text { font-size: 11px; }
svg.plan .faint { opacity: 0.75; }
svg.plan .stage { fill-opacity: 0.3; }
svg.plan .server { fill: none; stroke: var(--ink); stroke-opacity: 0.6; }
svg.plan .free { fill: var(--faint); fill-opacity: 0.15; stroke: var(--ink); stroke-opacity: 0.35; }
svg.plan .edge { stroke: var(--ink); stroke-opacity: 0.25; }
svg.plan .again { fill: var(--ink); fill-opacity: 0.5; }
svg.plan .link { stroke: var(--ink); stroke-opacity: 0.6; fill: none; }"""
"""The styles of a page with such drawings; it has the colours ``--ink`` and ``--faint``."""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _fitting(room: float, *texts: str) -> str:
    """Return the first of the texts that fits a width in pixels; "" if none fits."""
    return next((text for text in texts if _LETTER * len(text) + 6 <= room), "")


# --- The layers


def _edges(plan: PlanDrawing) -> list[float]:
    """Return the left edge of each layer, and the right edge of the last; each layer has a thousandth at least."""
    count = plan.layer_count
    total = sum(plan.seconds)
    shares = [seconds / total for seconds in plan.seconds] if total > 0 else [1 / count] * count
    shares = [max(share, 0.001) for share in shares]
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share)
    return [edge / edges[-1] * _WIDE for edge in edges]


def _draw_layers(plan: PlanDrawing, worker: int, top: float) -> Iterator[str]:
    edges = _edges(plan)
    for index, stage in enumerate(plan.stages):
        if stage.worker != worker:
            continue
        left, right = edges[stage.first], edges[stage.last + 1]
        name = f"stage {index}"
        layers = f"layers {stage.first} to {stage.last}" if stage.last > stage.first else f"layer {stage.first}"
        names = ""
        if plan.layers:
            names = f"\n{plan.layers[stage.first]}" + f" .. {plan.layers[stage.last]}" * (stage.last > stage.first)
        yield (
            f'<rect class="stage" x="{left:.2f}" y="{top:g}" width="{right - left:.2f}" height="{_LAYER:g}" '
            f"{_colour(plan, index)}><title>{escape(f'{name}: {layers}{names}')}</title></rect>"
        )
        if plan.layer_count <= _MOST_SEPARATE:
            for layer in range(stage.first, stage.last + 1):
                yield from _draw_layer(plan, layer, edges, top, stage.first)
        middle = (left + right) / 2
        yield _text(middle, top + 16, _fitting(right - left, name, str(index)), anchor="middle")
        span = f"{stage.first}-{stage.last}" if stage.last > stage.first else str(stage.first)
        yield _text(middle, top + 30, _fitting(right - left, layers, span), "faint", "middle")


def _draw_layer(plan: PlanDrawing, layer: int, edges: Sequence[float], top: float, first: int) -> Iterator[str]:
    left, right = edges[layer], edges[layer + 1]
    if layer > first:
        yield f'<line class="edge" x1="{left:.2f}" x2="{left:.2f}" y1="{top:g}" y2="{top + _LAYER:g}"/>'
    if layer in plan.recomputed:
        place = f'x="{left + 0.5:.2f}" y="{top + _LAYER - 4:g}" width="{max(0.5, right - left - 1):.2f}" height="4"'
        yield f'<rect class="again" {place}/>'
    if plan.layers:
        place = f'x="{left:.2f}" y="{top:g}" width="{right - left:.2f}" height="{_LAYER:g}"'
        yield f'<rect fill="transparent" {place}><title>{escape(f"layer {layer}: {plan.layers[layer]}")}</title></rect>'


def _colour(plan: PlanDrawing, stage: int) -> str:
    colour = series_colour(stage, len(plan.stages))
    return f'style="fill: {colour}; stroke: {colour}"'


# --- The servers


def _draw_servers(plan: PlanDrawing, top: float) -> tuple[list[str], float]:
    """Return the drawing of the servers, in lines, and its lower edge; a network joins those of a single line."""
    count = sum(len(server.devices) for server in plan.servers)
    box = next(size for most, size in _BOXES if count <= most)
    lines: list[list[DrawnServer]] = [[]]
    left = 0.0
    for server in plan.servers:
        width = _server_size(server, box)[0]
        if lines[-1] and left + width > _WIDE:
            lines.append([])
            left = 0.0
        lines[-1].append(server)
        left += width + _GAP
    parts = list[str]()
    for line in lines:
        left, bottom = 0.0, top
        centres = []
        for server in line:
            width, height = _server_size(server, box)
            parts += _draw_server(plan, server, (left, top, width, height), box)
            centres.append((left + width / 2, top + height))
            left, bottom = left + width + _GAP, max(bottom, top + height)
        if len(lines) == 1 and len(line) > 1:
            bus = bottom + 10
            ways = "".join(f"M{x:g} {y:g}V{bus:g}" for x, y in centres)
            parts.append(f'<path class="link" d="{ways}M{centres[0][0]:g} {bus:g}H{centres[-1][0]:g}"/>')
            bottom = bus + 4
        top = bottom + _GAP
    return parts, top - _GAP


def _server_size(server: DrawnServer, box: tuple[float, float]) -> tuple[float, float]:
    columns = _columns(server, box)
    width = max(columns * (box[0] + 4) + 8, _LETTER * len(server.name) + 16)
    return width, -(-len(server.devices) // columns) * (box[1] + 4) + 24


def _columns(server: DrawnServer, box: tuple[float, float]) -> int:
    return min(int((_WIDE - 8) // (box[0] + 4)), max(1, len(server.devices)))


def _draw_server(
    plan: PlanDrawing, server: DrawnServer, frame: tuple[float, float, float, float], box: tuple[float, float]
) -> Iterator[str]:
    left, top, width, height = frame
    yield f'<rect class="server" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    yield _text(left + 6, top + 13, server.name)
    columns = _columns(server, box)
    for place, device in enumerate(server.devices):
        x = left + 6 + place % columns * (box[0] + 4)
        y = top + 20 + place // columns * (box[1] + 4)
        yield from _draw_device(plan, device, server.kinds[place] if server.kinds else "", (x, y, *box))


def _draw_device(plan: PlanDrawing, device: int, kind: str, box: tuple[float, float, float, float]) -> Iterator[str]:
    x, y, wide, high = box
    own = [(index, stage) for index, stage in enumerate(plan.stages) if device in stage.devices]
    rows = {index: stage.rows[stage.devices.index(device)] for index, stage in own}
    title = f"device {device}{f' ({kind})' if kind else ''}"
    title += "".join(f"\nstage {index}: {_rows(count)}" for index, count in rows.items())
    place = f'y="{y:g}" height="{high:g}"'
    if not own:
        yield f'<rect class="free" x="{x:g}" width="{wide:g}" {place} rx="2"><title>{escape(title)}</title></rect>'
    for part, (index, _) in enumerate(own):
        width = wide / len(own)
        yield (
            f'<rect class="stage" x="{x + part * width:g}" width="{width:g}" {place} rx="2" {_colour(plan, index)}>'
            f"<title>{escape(title)}</title></rect>"
        )
    if high < 15:
        return
    if high < 30:
        yield _text(x + wide / 2, y + 14, _fitting(wide + 8, str(device)), anchor="middle")
        return
    yield _text(x + wide / 2, y + 14, _fitting(wide, f"device {device} {kind}".rstrip(), str(device)), anchor="middle")
    told = ""
    if len(own) == 1:
        ((index, count),) = rows.items()
        told = _fitting(wide, f"stage {index}, {_rows(count)}", f"{index}: {_rows(count)}", f"stage {index}")
    elif own:
        numbers = ", ".join(str(index) for index in rows)
        told = _fitting(wide, f"stages {numbers}", numbers, format_count(len(own), "stage"))
    yield _text(x + wide / 2, y + 28, told, "faint", "middle")


def _rows(count: float) -> str:
    return f"{count:g} row{'' if count == 1 else 's'}"
