"""Random moves of a local search over layouts: of cuts, devices, stages, the micro-batch size and re-computation."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.layout import IDLE, Layout, MoveTables
from dapple_tf.simulator.compiled import Integers, compiled, compiled_part


@compiled
def draw(random: Integers, below: int) -> int:
    """Return a pseudo-random whole number from 0 on, below ``below``; ``random`` is the generator's state, [1]."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(below)))


@compiled_part
def draw_share(random: Integers) -> float:
    """Return a pseudo-random number from 0 to 1."""
    return draw(random, 1 << 30) / (1 << 30)


@compiled_part
def count_devices(layout: Layout, stage: int) -> int:
    """Return how many places belong to a stage, or are idle."""
    count = 0
    for s in layout.owner:
        count += s == stage
    return count


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
def give_devices(t: MoveTables, layout: Layout, source: int, target: int, wanted: int, random: Integers) -> bool:
    """Move up to ``wanted`` devices from one stage (or IDLE) to another, from one place on, those of one server first.

    A stage keeps at least one.
    """
    have = count_devices(layout, source)
    wanted = min(wanted, have if source == IDLE else have - 1)
    if wanted < 1 or source == target:
        return False
    skip, devices, first = draw(random, have), len(layout.owner), -1
    for i in range(devices):
        if layout.owner[i] == source:
            if skip == 0:
                first = i
                break
            skip -= 1
    home = t.homes[layout.device_at[first]]
    for same in (True, False):
        for k in range(devices):
            i = (first + k) % devices
            if wanted and layout.owner[i] == source and (t.homes[layout.device_at[i]] == home or not same):
                layout.owner[i] = target
                wanted -= 1
    return True


@compiled_part
def spread_devices(layout: Layout, source: int, target: int, wanted: int) -> bool:
    """Move ``wanted`` devices from one stage to another, evenly among its places; it keeps at least one."""
    have, seen, moved = count_devices(layout, source), 0, 0
    if not 0 < wanted < have:
        return False
    for i in range(len(layout.owner)):
        if layout.owner[i] == source:
            seen += 1
            if moved < wanted * seen // have:
                layout.owner[i] = target
                moved += 1
    return True


@compiled_part
def take_first_devices(layout: Layout, source: int, target: int, wanted: int, last: bool) -> bool:
    """Move the first ``wanted`` devices of a stage, or its last ones, to another; it keeps at least one."""
    if not 0 < wanted < count_devices(layout, source):
        return False
    devices = len(layout.owner)
    for k in range(devices):
        i = devices - 1 - k if last else k
        if wanted and layout.owner[i] == source:
            layout.owner[i] = target
            wanted -= 1
    return True


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
def deal_devices(layout: Layout, first: int, last: int, scatter: bool) -> bool:
    """Share the places of the stages ``first`` to ``last`` (inclusive) out among them anew, as many to each as before.

    In the order of the places, or with ``scatter`` evenly among them. ``last`` may be S, which stands for idle devices.
    Returns whether that changed anything.
    """
    stages = layout.shape[0]
    wanted, given = np.zeros(last + 1 - first, np.int64), np.zeros(last + 1 - first, np.int64)
    total, seen, chosen, changed = 0, 0, 0, False
    for owner in layout.owner:
        s = stages if owner == IDLE else owner
        if first <= s <= last:
            wanted[s - first] += 1
            total += 1
    for i in range(len(layout.owner)):
        owner = stages if layout.owner[i] == IDLE else layout.owner[i]
        if not first <= owner <= last:
            continue
        seen += 1
        if scatter:
            chosen, most = -1, 0
            for k in range(len(wanted)):
                lacking = wanted[k] * seen - given[k] * total
                if given[k] < wanted[k] and (chosen < 0 or lacking > most):
                    chosen, most = k, lacking
        else:
            while given[chosen] == wanted[chosen]:
                chosen += 1
        given[chosen] += 1
        changed = changed or owner != first + chosen
        layout.owner[i] = IDLE if first + chosen == stages else first + chosen
    return changed


@compiled_part
def swap_owners(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Exchange a device of one stage for one of another server, of another stage or idle; the places keep theirs."""
    i, j = draw(random, len(layout.owner)), draw(random, len(layout.owner))
    a, b = layout.owner[i], layout.owner[j]
    layout.owner[i], layout.owner[j] = b, a
    return bool(a != b and t.homes[layout.device_at[i]] != t.homes[layout.device_at[j]])


@compiled_part
def swap_devices(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Exchange the devices at two places, which are on different servers; with it their order within stages."""
    i, j = draw(random, len(layout.owner)), draw(random, len(layout.owner))
    a, b = layout.device_at[i], layout.device_at[j]
    layout.device_at[i], layout.device_at[j] = b, a
    return bool(t.homes[a] != t.homes[b] and (layout.owner[i] != IDLE or layout.owner[j] != IDLE))


@compiled_part
def swap_servers(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Swap the stages of two servers' devices: the first device of one with the first of the other, and so on.

    The surplus devices of the larger server keep their stages.
    """
    places = len(layout.owner)
    a = t.homes[layout.device_at[draw(random, places)]]
    b = t.homes[layout.device_at[draw(random, places)]]
    if a == b:
        return False
    j, changed = 0, False
    for i in range(places):
        if t.homes[layout.device_at[i]] == a:
            while j < places and t.homes[layout.device_at[j]] != b:
                j += 1
            if j == places:
                break
            changed = changed or layout.owner[i] != layout.owner[j]
            layout.owner[i], layout.owner[j] = layout.owner[j], layout.owner[i]
            j += 1
    return changed


@compiled_part
def gather_stage(t: MoveTables, layout: Layout, stage: int, random: Integers) -> bool:
    """Gather a stage on one server that it already uses: exchange its other devices for devices of that server."""
    places, j, changed = len(layout.owner), 0, False
    skip = draw(random, count_devices(layout, stage))
    server = 0
    for i in range(places):
        if layout.owner[i] == stage:
            server = t.homes[layout.device_at[i]]
            if skip == 0:
                break
            skip -= 1
    for i in range(places):
        if layout.owner[i] == stage and t.homes[layout.device_at[i]] != server:
            while j < places and (t.homes[layout.device_at[j]] != server or layout.owner[j] == stage):
                j += 1
            if j == places:
                break
            layout.owner[i], layout.owner[j] = layout.owner[j], stage
            changed = True
    return changed


@compiled_part
def swap_stages(layout: Layout, a: int, b: int) -> None:
    """Exchange all devices of two stages."""
    for i in range(len(layout.owner)):
        if layout.owner[i] == a:
            layout.owner[i] = b
        elif layout.owner[i] == b:
            layout.owner[i] = a


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
    if kind < 22:
        return stages > 1 and shift_cut(layout, 1 + draw(random, stages - 1), draw_shift(random))
    if kind < 44:  # devices to another stage, often the next one, and often with cuts that follow
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
    if kind < 50:
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
        return deal_devices(layout, min(a, b), max(a, b), draw(random, 2) == 0)
    if kind < 64:
        return split_stage(t, layout, s, random) and (draw(random, 3) > 0 or _more(t, layout, random))
    if kind < 74:
        if stages < 2:
            return False
        merge_stages(layout, draw(random, stages - 1), draw(random, 8) == 0)
        return draw(random, 3) > 0 or _more(t, layout, random)
    if kind < 82:
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
    if kind < 86:
        other = draw(random, stages)
        swap_stages(layout, s, other)
        if draw(random, 2):
            even_cuts(t, layout, min(s, other), max(s, other))
        return s != other
    if kind < 90:
        return give_devices(t, layout, s, IDLE, 1 + (draw(random, devices) if draw(random, 4) == 0 else 0), random)
    if kind < 94:
        other = draw(random, stages)
        even_cuts(t, layout, min(s, other), max(s, other))
        return s != other
    if not t.may_recompute:
        return stages > 1 and shift_cut(layout, 1 + draw(random, stages - 1), draw_shift(random))
    layout.recompute[s] = not layout.recompute[s]
    return True


@compiled_part
def _more(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Cut all stages again, or a random range of them."""
    stages = layout.shape[0]
    a, b = draw(random, stages), draw(random, stages)
    if draw(random, 2):
        a, b = 0, stages - 1
    even_cuts(t, layout, min(a, b), max(a, b))
    return True
