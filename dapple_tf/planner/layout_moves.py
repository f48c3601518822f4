"""Random moves of a local search over layouts: of cuts, devices, stages, the micro-batch size and re-computation."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.device_moves import (
    assign_devices,
    count_devices,
    gather_stage,
    give_devices,
    spread_devices,
    swap_devices,
    swap_owners,
    swap_servers,
    swap_stages,
    take_first_devices,
)
from dapple_tf.planner.draws import draw, draw_share
from dapple_tf.planner.layout import IDLE, Layout, MoveTables
from dapple_tf.simulator.compiled import Integers, compiled_part


@compiled_part
def shift_cut(layout: Layout, boundary: int, blocks: int) -> bool:
    """Move the cut before stage ``boundary`` by ``blocks``, as far as both stages keep a block."""
    start = layout.starts[boundary]
    moved = min(max(start + blocks, layout.starts[boundary - 1] + 1), layout.starts[boundary + 1] - 1)
    layout.starts[boundary] = moved
    return bool(moved != start)


@compiled_part
def draw_shift(random: Integers) -> int:
    """Return a signed number of blocks: n blocks, at most 64, with probability 2 ** -n, in either direction."""
    blocks = 1
    while draw(random, 2) and blocks < 64:
        blocks += 1
    return blocks if draw(random, 2) else -blocks


@compiled_part
def split_stage(t: MoveTables, layout: Layout, stage: int, random: Integers) -> bool:
    """Cut a stage in two, and share its devices between them; or give one of them idle devices."""
    stages = layout.shape[0]
    first, end = layout.starts[stage], layout.starts[stage + 1]
    have, idle = count_devices(layout, stage), count_devices(layout, IDLE)
    if end - first < 2 or stages + 1 >= len(layout.starts) or (have < 2 and idle < 1):
        return False
    for i in range(len(layout.owner)):
        if layout.owner[i] > stage:
            layout.owner[i] += 1
    for s in range(stages, stage, -1):
        layout.starts[s + 1] = layout.starts[s]
        layout.recompute[s] = layout.recompute[s - 1]
    layout.starts[stage + 1] = first + 1 + draw(random, end - first - 1)
    layout.shape[0] = stages + 1
    if idle and (have < 2 or draw(random, 2)):
        return give_devices(t, layout, IDLE, stage + 1, 1 + draw(random, idle), random)
    work = t.work[layout.shape[1]]
    share, begin = work[layout.starts[stage + 1]], work[first]
    whole = work[end] - begin
    wanted = have - int(have * (share - begin) / whole + draw_share(random)) if whole > 0 else have // 2
    if draw(random, 4) == 0:
        wanted = 1 + draw(random, have - 1)
    wanted = min(max(wanted, 1), have - 1)
    if draw(random, 2):
        return spread_devices(layout, stage, stage + 1, wanted)
    return take_first_devices(layout, stage, stage + 1, wanted, True)


@compiled_part
def merge_stages(layout: Layout, stage: int, drop: bool) -> None:
    """Make one stage of ``stage`` and the next one, on the devices of both; with ``drop`` on those of one."""
    stages = layout.shape[0]
    for i in range(len(layout.owner)):
        if layout.owner[i] == stage + 1 and drop:
            layout.owner[i] = IDLE
        elif layout.owner[i] > stage:
            layout.owner[i] -= 1
    for s in range(stage + 1, stages):
        layout.starts[s] = layout.starts[s + 1]
        if s + 1 < stages:
            layout.recompute[s] = layout.recompute[s + 1]
    layout.shape[0] = stages - 1


@compiled_part
def even_cuts(t: MoveTables, layout: Layout, first: int, last: int) -> None:
    """Cut the stages ``first`` to ``last`` (inclusive) again, each with compute in proportion to its devices' speed."""
    begin, end = layout.starts[first], layout.starts[last + 1]
    work, total, before = t.work[layout.shape[1]], 0.0, 0.0
    speed = np.zeros(last + 1 - first)
    for i, s in enumerate(layout.owner):
        if first <= s <= last:
            speed[s - first] += t.speed[layout.device_at[i]]
            total += t.speed[layout.device_at[i]]
    whole, block = work[end] - work[begin], begin
    for s in range(first, last):
        before += speed[s - first]
        wanted, most = work[begin] + whole * before / total, end - (last - s)
        block = max(block, layout.starts[s] + 1)
        while block < most and work[block] < wanted:
            block += 1
        if block - 1 > layout.starts[s] and wanted - work[block - 1] < work[block] - wanted:
            block -= 1
        layout.starts[s + 1] = min(block, most)


@compiled_part
def busiest_stage(t: MoveTables, layout: Layout) -> int:
    """Return the stage whose devices compute longest for a micro-batch, without what they transfer and reduce."""
    work, replicas = t.work[layout.shape[1]], np.zeros(layout.shape[0], np.int64)
    for s in layout.owner:
        if s != IDLE:
            replicas[s] += 1
    longest, found = -1.0, 0
    for s in range(layout.shape[0]):
        seconds = (work[layout.starts[s + 1]] - work[layout.starts[s]]) / max(1, replicas[s])
        if seconds > longest:
            longest, found = seconds, s
    return found


@compiled_part
def relieve(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Give the busiest stage devices: of another stage, idle ones, or those that two merged stages need no more."""
    stages, busiest = layout.shape[0], busiest_stage(t, layout)
    if stages < 2:
        return False
    if draw(random, 2):
        a = draw(random, stages - 1)
        if busiest == a or busiest == a + 1:
            return False
        fewer = min(count_devices(layout, a), count_devices(layout, a + 1))
        merge_stages(layout, a, False)
        if busiest > a:
            busiest -= 1
        wanted = fewer if draw(random, 2) else 1 + draw(random, fewer)
        return give_devices(t, layout, a, busiest, wanted, random)
    source = draw(random, stages)
    if draw(random, 4) == 0:
        source = IDLE
    if not give_devices(t, layout, source, busiest, 1 if draw(random, 3) else 2, random):
        return False
    if source != IDLE and draw(random, 3) == 0:
        even_cuts(t, layout, min(source, busiest), max(source, busiest))
    return True


@compiled_part
def rescale(t: MoveTables, layout: Layout, size: int, random: Integers) -> None:
    """Change the index of the micro-batch size; split stages with too many replicas for it, or merge some of them."""
    grows = size > layout.shape[1]
    layout.shape[1] = size
    most = t.sizes[size]
    if grows:
        for s in range(layout.shape[0] - 2, -1, -1):
            if draw(random, 2) and count_devices(layout, s) + count_devices(layout, s + 1) <= most:
                merge_stages(layout, s, False)
    else:
        for s in range(layout.shape[0] - 1, -1, -1):
            while count_devices(layout, s) > most and split_stage(t, layout, s, random):
                pass
        for s in range(layout.shape[0]):
            give_devices(t, layout, s, IDLE, count_devices(layout, s) - most, random)
    if draw(random, 2):
        even_cuts(t, layout, 0, layout.shape[0] - 1)


@compiled_part
def move_at_random(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Change a layout by one random move; return False if the result is not worth simulating, changed or not.

    The new layout may be one that cannot run.
    """
    stages, devices, sizes = layout.shape[0], len(layout.owner), len(t.sizes)
    kind = draw(random, 100)
    s = draw(random, stages)
    if kind < 18:
        return stages > 1 and shift_cut(layout, 1 + draw(random, stages - 1), draw_shift(random))
    if kind < 36:  # devices to another stage, often the next one, and often with cuts that follow
        source, target = s, draw(random, stages)
        if draw(random, 2):
            target = s + 1 if draw(random, 2) else s - 1
        if draw(random, 4) == 0:
            source = IDLE
            target = s
        if not 0 <= target < stages:
            return False
        wanted = 1 if draw(random, 3) else 1 + draw(random, max(1, devices // 2))
        if not give_devices(t, layout, source, target, wanted, random):
            return False
        follow = draw(random, 3)
        if source == IDLE or follow == 0:
            if stages > 1 and draw(random, 2):
                shift_cut(layout, 1 + draw(random, stages - 1), draw_shift(random))
        elif follow == 1:
            even_cuts(t, layout, min(source, target), max(source, target))
        else:  # the target gets a block more: every cut between the two moves
            for boundary in range(min(source, target) + 1, max(source, target) + 1):
                shift_cut(layout, boundary, -1 if source < target else 1)
        return True
    if kind < 46:
        return relieve(t, layout, random)
    if kind < 51:
        if draw(random, 4) == 0:
            return swap_servers(t, layout, random)
        if draw(random, 3) == 0:
            return gather_stage(t, layout, s, random)
        if t.unequal_links and draw(random, 2):
            return swap_devices(t, layout, random)
        return swap_owners(t, layout, random)
    if kind < 54:
        a, b = s, draw(random, stages)
        if draw(random, 2):
            a, b = 0, stages - 1
        if draw(random, 4) == 0:
            even_cuts(t, layout, min(a, b), max(a, b))
        return assign_devices(layout, min(a, b), max(a, b), draw(random, 2) == 0)
    if kind < 63:
        return split_stage(t, layout, s, random) and (draw(random, 3) > 0 or _cut_again(t, layout, random))
    if kind < 72:
        if stages < 2:
            return False
        merge_stages(layout, draw(random, stages - 1), draw(random, 8) == 0)
        return draw(random, 3) > 0 or _cut_again(t, layout, random)
    if kind < 80:
        if sizes < 2:
            return False
        z = layout.shape[1] + (1 if draw(random, 2) else -1) if draw(random, 4) else draw(random, sizes)
        if not 0 <= z < sizes or z == layout.shape[1]:
            return False
        if draw(random, 2):
            rescale(t, layout, z, random)
        layout.shape[1] = z
        if draw(random, 3) == 0:
            even_cuts(t, layout, 0, layout.shape[0] - 1)
        return True
    if kind < 84:
        other = draw(random, stages)
        swap_stages(layout, s, other)
        if draw(random, 2):
            even_cuts(t, layout, min(s, other), max(s, other))
        return s != other
    if kind < 88:
        return give_devices(t, layout, s, IDLE, 1 + (draw(random, devices) if draw(random, 4) == 0 else 0), random)
    if kind < 92:
        other = draw(random, stages)
        even_cuts(t, layout, min(s, other), max(s, other))
        return s != other
    if not t.may_recompute:
        return stages > 1 and shift_cut(layout, 1 + draw(random, stages - 1), draw_shift(random))
    layout.recompute[s] = not layout.recompute[s]
    return True


@compiled_part
def _cut_again(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Cut all stages again, or a random range of them; return True."""
    stages = layout.shape[0]
    a, b = draw(random, stages), draw(random, stages)
    if draw(random, 2):
        a, b = 0, stages - 1
    even_cuts(t, layout, min(a, b), max(a, b))
    return True
