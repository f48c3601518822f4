"""Change which devices the stages of a layout have: move some, exchange some, or assign all again."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.draws import draw
from dapple_tf.planner.layout import IDLE, Layout, MoveTables
from dapple_tf.simulator.compiled import Integers, compiled_part


@compiled_part
def count_devices(layout: Layout, stage: int) -> int:
    """Return how many devices a stage has, or how many are idle."""
    count = 0
    for s in layout.owner:
        count += s == stage
    return count


@compiled_part
def give_devices(t: MoveTables, layout: Layout, source: int, target: int, wanted: int, random: Integers) -> bool:
    """Move up to ``wanted`` devices from one stage (or IDLE) to another; the stage keeps at least one.

    They are a random device of the stage and those that follow it in the device order, first those of its server.
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
    """Move ``wanted`` devices of a stage, spread evenly over its own, to another stage; it keeps at least one."""
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
def assign_devices(layout: Layout, first: int, last: int, scatter: bool) -> bool:
    """Assign the devices of the stages ``first`` to ``last`` (inclusive) again, as many to each as before.

    Stages take devices in the device order, or with ``scatter`` each stage's are spread evenly over it. ``last`` may be
    S, which stands for idle devices. Return whether anything changed.
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
    """Exchange the owners of two devices of different servers; the device order stays. Return whether they differ."""
    i, j = draw(random, len(layout.owner)), draw(random, len(layout.owner))
    a, b = layout.owner[i], layout.owner[j]
    layout.owner[i], layout.owner[j] = b, a
    return bool(a != b and t.homes[layout.device_at[i]] != t.homes[layout.device_at[j]])


@compiled_part
def swap_devices(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Exchange two devices of different servers in the device order, and so their owners and their order in stages."""
    i, j = draw(random, len(layout.owner)), draw(random, len(layout.owner))
    a, b = layout.device_at[i], layout.device_at[j]
    layout.device_at[i], layout.device_at[j] = b, a
    return bool(t.homes[a] != t.homes[b] and (layout.owner[i] != IDLE or layout.owner[j] != IDLE))


@compiled_part
def swap_servers(t: MoveTables, layout: Layout, random: Integers) -> bool:
    """Swap the stages of two servers' devices: the first device of one with the first of the other, and so on.

    The surplus devices of the larger server keep their stages.
    """
    devices = len(layout.owner)
    a = t.homes[layout.device_at[draw(random, devices)]]
    b = t.homes[layout.device_at[draw(random, devices)]]
    if a == b:
        return False
    j, changed = 0, False
    for i in range(devices):
        if t.homes[layout.device_at[i]] == a:
            while j < devices and t.homes[layout.device_at[j]] != b:
                j += 1
            if j == devices:
                break
            changed = changed or layout.owner[i] != layout.owner[j]
            layout.owner[i], layout.owner[j] = layout.owner[j], layout.owner[i]
            j += 1
    return changed


@compiled_part
def gather_stage(t: MoveTables, layout: Layout, stage: int, random: Integers) -> bool:
    """Gather a stage on one server that it already uses: exchange its other devices for devices of that server."""
    devices, j, changed = len(layout.owner), 0, False
    skip = draw(random, count_devices(layout, stage))
    server = 0
    for i in range(devices):
        if layout.owner[i] == stage:
            server = t.homes[layout.device_at[i]]
            if skip == 0:
                break
            skip -= 1
    for i in range(devices):
        if layout.owner[i] == stage and t.homes[layout.device_at[i]] != server:
            while j < devices and (t.homes[layout.device_at[j]] != server or layout.owner[j] == stage):
                j += 1
            if j == devices:
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
