"""Choose what the drawing of a plan shows of its model and its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.drawing.plan import DrawnServer, DrawnStage, PlanDrawing
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.units import format_bytes, format_seconds
from dapple_tf.wording import format_count

_MOST_LINKS = 12  # in the notes of a drawing


def describe_plan_drawing(
    plan: Plan | None,
    cluster: Cluster | None = None,
    profile: Profile | None = None,
    *,
    layer_names: Sequence[str] = (),
) -> PlanDrawing:
    """Return the drawing of a plan, or of a cluster alone.

    Without a ``cluster`` the plan's devices stand together. With a ``profile`` layers have names, and their widths are
    in proportion to their seconds; without one ``layer_names`` are used.
    """
    together = (DrawnServer("devices", () if plan is None else tuple(plan.device_numbers)),)
    servers = together if cluster is None else _drawn_servers(cluster)
    seconds: tuple[float, ...] = ()
    if profile is not None:
        layer_names = [layer.name for layer in profile.layers]
        seconds = tuple(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)
    stages = () if plan is None else tuple(_drawn_stages(plan))
    return PlanDrawing(
        stages,
        servers,
        tuple(layer_names),
        seconds,
        () if plan is None else plan.recomputed,
        () if plan is not None or cluster is None else tuple(_notes(cluster)),
    )


def _drawn_servers(cluster: Cluster) -> tuple[DrawnServer, ...]:
    servers, first = [], 0
    for server in cluster.servers:
        servers.append(DrawnServer(server.name, tuple(range(first, first + server.devices)), server.kinds))
        first += server.devices
    return tuple(servers)


def _drawn_stages(plan: Plan) -> list[DrawnStage]:
    stages = []
    for stage in plan.stages:
        samples = plan.micro_batch_size
        rows = stage.in_rows(samples).shares or (samples / stage.replicas,) * stage.replicas
        if plan.runs_whole_minibatches:
            rows = (float(samples),) * stage.replicas
        stages.append(DrawnStage(stage.first_layer, stage.last_layer, stage.devices, rows, stage.worker or 0))
    return stages


def _notes(cluster: Cluster) -> list[str]:
    """Return the memory of the devices and the speed of the links, a line each."""
    kinds = {}
    for device, kind in enumerate(cluster.device_kinds):
        kinds[kind] = cluster.memories[device]
    memories = [f"{f'a {kind}' if kind else 'a device'} has {format_bytes(memory)}" for kind, memory in kinds.items()]
    lines = [", ".join(memories)]
    if max(server.devices for server in cluster.servers) > 1:
        lines.append(f"inside a server {_link(cluster.intra_server)}")
    if len(cluster.servers) > 1:
        lines.append(f"between servers {_link(cluster.inter_server)}")
    lines += [f"{a} to {b}: {_link(link)}" for (a, b), link in list(cluster.links.items())[:_MOST_LINKS]]
    if len(cluster.links) > _MOST_LINKS:
        lines.append(f"and {format_count(len(cluster.links) - _MOST_LINKS, 'more link')} of their own")
    return lines


def _link(link: Link) -> str:
    return f"{format_bytes(link.bandwidth)}/s, latency {format_seconds(link.latency)}"
