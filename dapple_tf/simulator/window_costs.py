"""The cost model of asynchronous windows: what an action, a transfer and an update of a plan's stages take."""

from __future__ import annotations

import itertools
from dataclasses import replace

from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, profile_on
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.shared_flows import FlowDemand, ring_demand, transfer_demand
from dapple_tf.simulator.transfer import LinkTables, allreduce_cost, link_tables, ring_seconds, transfer_cost
from dapple_tf.simulator.window_execution import Route, WindowCosts
from dapple_tf.timeline.stage_costs import StageCosts


def window_costs(
    plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2, contention: bool = False
) -> WindowCosts:
    """Return the costs of the stages of ``plan``, which has a window; updates take no time.

    Replicas that take minibatches in turn run each of them whole, as slowly as the slowest device of the stage, and a
    transfer goes from one device to another. It occupies channels, which two transfers of one boundary and direction
    cannot use at the same time: between servers the sender's and the receiver's interface, or the link that these two
    servers have of their own; inside a server the two devices. Replicas that share micro-batches cost what they do in a
    synchronous step. The bytes of each stage include ``Versions.slots`` more copies of its weights. ``contention``:
    transfers of different boundaries and AllReduces share interfaces.
    """
    versions = plan.versions
    whole = replace(plan, window=None, overlap=False)
    if versions.window.in_turn:
        # The costs of a plan without replicas are those of a replica that computes a minibatch on its own.
        seconds = [profile_on(profile, cluster, d).model_seconds(profile.batch_size) for d in range(cluster.devices)]
        slowest = [max(stage.devices, key=lambda d: seconds[d]) for stage in plan.stages]
        alone = tuple(StagePlan(s.first_layer, s.last_layer, (d,)) for s, d in zip(plan.stages, slowest, strict=True))
        costs = stage_costs(replace(whole, stages=alone), profile, cluster, optimizer_slots=optimizer_slots)
    else:
        costs = stage_costs(whole, profile, cluster, optimizer_slots=optimizer_slots)
    tables, crossing = link_tables(cluster), profile.crossing_bytes()
    homes = [[cluster.homes[device] for device in stage.devices] for stage in plan.stages]
    found, routes = [], dict[tuple[int, int, int], tuple[Route, Route]]()
    for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
        parameters = float(profile.parameter_bytes[stage.first_layer : stage.last_layer + 1].sum())
        sent = 0.0
        if index + 1 < len(costs):
            pair = homes[index], homes[index + 1]
            if versions.window.in_turn:
                amount = float(crossing[stage.last_layer]) * plan.micro_batch_size / profile.batch_size
                own = _routes(index, *pair, amount, tables)
            else:
                shares = stage.row_shares, plan.stages[index + 1].row_shares
                demands = transfer_demand(*pair, tables, shares), transfer_demand(*pair[::-1], tables, shares[::-1])
                forward, backward = (Route(cost.send_forward_seconds, demand=demand) for demand in demands)
                own = {(index, 0, 0): (forward, backward)}
            routes |= own
            sent = max(route.seconds for route, _ in own.values())
        reduced = ring_seconds(*allreduce_cost(homes[index], tables), parameters)
        found.append(
            replace(
                cost,
                send_forward_seconds=sent,
                send_backward_seconds=sent,
                allreduce_seconds=reduced,
                exposed_seconds=reduced,
                fixed_bytes=cost.fixed_bytes + versions.slots[index] * parameters,
            )
        )
    updates, rings = (0.0,) * len(found), tuple(ring_demand(servers, tables) for servers in homes)
    if contention:
        return WindowCosts(tuple(found), routes, updates, rings)
    unshared = {key: (replace(route, demand=FlowDemand()),) * 2 for key, (route, _) in routes.items()}
    return WindowCosts(tuple(found), unshared, updates)


def uniform_costs(
    stages: tuple[StageCosts, ...], replicas: tuple[int, ...], update_seconds: tuple[float, ...]
) -> WindowCosts:
    """Return costs in which all pairs of replicas of two stages have the same seconds for a transfer.

    They are ``send_forward_seconds`` and ``send_backward_seconds`` of ``stages``. A replica sends one transfer at a
    time, and receives one at a time.
    """
    routes = {}
    for boundary, cost in enumerate(stages[:-1]):
        for a, b in itertools.product(range(replicas[boundary]), range(replicas[boundary + 1])):
            channels = f"device {a}", f"device {b} of the next stage"
            seconds = cost.send_forward_seconds, cost.send_backward_seconds
            routes[boundary, a, b] = Route(seconds[0], channels), Route(seconds[1], channels)
    return WindowCosts(stages, routes, update_seconds)


def _routes(
    boundary: int, senders: list[int], receivers: list[int], amount: float, tables: LinkTables
) -> dict[tuple[int, int, int], tuple[Route, Route]]:
    """Return the routes of ``amount`` bytes between each two replicas, forward and backward.

    ``senders``, ``receivers``: their servers.
    """
    found = {}
    for i, a in enumerate(senders):
        for j, b in enumerate(receivers):
            latency, per_byte = transfer_cost([a], [b], tables)
            if a == b:
                channels: tuple[str, ...] = (f"device {i}", f"device {j} of the next stage")
            elif tables.own[a, b] > 0:
                channels = (f"link of servers {a} and {b}",)
            else:
                channels = (f"interface of server {a}", f"interface of server {b} to the next stage")
            demands = transfer_demand([a], [b], tables), transfer_demand([b], [a], tables)
            forward, backward = (Route(latency + per_byte * amount, channels, demand) for demand in demands)
            found[boundary, i, j] = forward, backward
    return found
