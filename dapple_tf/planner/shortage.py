"""Why no plan fits the devices' memory, and what would."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.planner.even import even_starts
from dapple_tf.planner.task import Task
from dapple_tf.timeline.chart import scale_bytes


def describe_shortage(task: Task) -> str:
    """The stage that lacks most where the layers are spread as evenly by memory as they can be, and the remedies."""
    size = task.micro_batch_sizes[0]
    need, first, last = _tightest(task, size, task.cluster.devices)
    layers = task.profile.layers
    memory = task.cluster.device_memory
    text = (
        f"{task.profile.model!r} does not fit {task.cluster.devices} devices of {show_bytes(memory)}: even spread for "
        f"memory, with one micro-batch of {size} samples in flight, the stage of layers {first} to {last} "
        f"({layers[first].name} .. {layers[last].name}) needs {show_bytes(need)} and lacks {show_bytes(need - memory)}"
    )
    remedies = _remedies(task, size)
    if remedies:
        return f"{text}. It would fit with {', or with '.join(remedies)}"
    return f"{text}. No number of such devices would do, not even with recompute: cut the model finer"


def _remedies(task: Task, size: int) -> list[str]:
    memory, found = task.cluster.device_memory, []
    blocks = len(task.chain.parameter_bytes)
    if not task.recompute and _tightest(replace(task, recompute=True), size, task.cluster.devices)[0] <= memory:
        found.append("recompute")
    if size > 1 and _tightest(task, 1, task.cluster.devices)[0] <= memory:
        fits = max(b for b in range(1, size) if _tightest(task, b, task.cluster.devices)[0] <= memory)
        found.append(f"micro-batches of {fits} samples")
    for recompute in (False, True):
        other = replace(task, recompute=recompute)
        counts = [n for n in range(task.cluster.devices + 1, blocks + 1) if _tightest(other, size, n)[0] <= memory]
        if counts:
            found.append(f"{counts[0]} devices" + (" and recompute" if recompute and not task.recompute else ""))
            break
    return found


def _tightest(task: Task, size: int, devices: int) -> tuple[float, int, int]:
    """The largest need (bytes) of a stage, and its first and last layer, over even stages of one device each."""
    chain, scale = task.chain, size / task.profile.batch_size
    fixed = chain.parameter_bytes * (2 + task.optimizer_slots)
    starts = even_starts(fixed + chain.stash_bytes * scale, min(devices, len(fixed)))
    needs = []
    for first, end in zip(starts, [*starts[1:], len(fixed)], strict=True):
        stash, work = chain.stash_bytes[first:end].sum(), chain.working_bytes[first:end].max()
        entering = chain.crossing_bytes[first - 1] if task.recompute and first else 0.0
        need = fixed[first:end].sum() + (stash + work + entering) * scale
        needs.append((float(need), chain.positions[first], chain.positions[end] - 1))
    return max(needs)


def show_bytes(count: float) -> str:
    """Bytes as people read them: ``15.2 GB``."""
    size, unit = scale_bytes(count)
    return f"{count / size:.3g} {unit}"
