"""Drawings of plans and clusters: each layer, stage, device and row once, at a place that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

import dapple_tf as dapple
from dapple_tf.drawing.plan import DrawnServer, DrawnStage, PlanDrawing, draw_plan
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from dapple_tf.timeline.plan_drawing import describe_plan_drawing
from dapple_tf.window_plan import WindowPlan
from tests.dapple_tf.drawing.test_chart import Page
from tests.dapple_tf.simulator.builders import make_cluster, make_plan, make_profile

PLAN = make_plan((0, 1, (0, 1, 2)), (2, 2, (3,)), global_batch_size=16, micro_batch_size=8, micro_batches=2)


def boxes(drawing: PlanDrawing, kind: str) -> list[tuple[float, float]]:
    """The left edges and widths of the boxes of a kind, in the order in which they are drawn."""
    rects = [rect for rect in Page(draw_plan(drawing)).named("rect") if rect.get("class") == kind]
    return [(float(rect["x"] or 0), float(rect["width"] or 0)) for rect in rects]


def test_a_plan_has_its_layers_stages_servers_and_rows() -> None:
    profile = make_profile((1, 2), (1, 0), (1, 1))
    cluster = Cluster((Server("a", 3), Server("b", 2)), 1000, Link(1e9, 0), Link(1e9, 0))
    drawing = describe_plan_drawing(PLAN, cluster, profile)
    assert drawing.stages == (DrawnStage(0, 1, (0, 1, 2), (2, 3, 3)), DrawnStage(2, 2, (3,), (8,)))
    assert drawing.servers == (DrawnServer("a", (0, 1, 2)), DrawnServer("b", (3, 4)))
    assert drawing.layers == tuple(layer.name for layer in profile.layers)
    assert drawing.seconds == (3, 1, 2)
    text = draw_plan(drawing)
    for told in ("stage 0, 3 rows", "stage 0, 2 rows", "stage 1, 8 rows", "layers 0 to 1", "layer 2", "device 4"):
        assert f">{told}</text>" in text
    assert text.count(">stage 0, 3 rows</text>") == 2


def test_layers_are_as_wide_as_they_compute_long() -> None:
    drawing = describe_plan_drawing(PLAN, make_cluster(4), make_profile((1, 2), (1, 0), (1, 1)))
    (left, first), (right, second), *_ = boxes(drawing, "stage")
    assert (left, right) == (0, first)
    assert first / second == pytest.approx(4 / 2, rel=1e-3)
    drawing = describe_plan_drawing(PLAN)
    assert boxes(drawing, "stage")[0][1] == pytest.approx(2 * boxes(drawing, "stage")[1][1], rel=1e-3)


def test_a_layer_that_computes_nothing_can_be_seen() -> None:
    drawing = describe_plan_drawing(PLAN, None, make_profile((1, 2), (1, 0), (0, 0)))
    assert boxes(drawing, "stage")[1][1] > 0.5
    nothing = describe_plan_drawing(PLAN, None, make_profile((0, 0), (0, 0), (0, 0)))
    assert boxes(nothing, "stage")[1][1] == pytest.approx(300, rel=1e-3)


def test_recomputed_layers_are_marked() -> None:
    plan = make_plan((0, 1, (0,)), (2, 2, (1,)), recompute=(1,))
    assert len(boxes(describe_plan_drawing(plan), "again")) == 1
    assert "re-computed" in draw_plan(describe_plan_drawing(plan))


def test_replicas_that_take_minibatches_in_turn_take_all_rows() -> None:
    plan = make_plan(
        (0, 1, (0, 1)),
        (2, 2, (2,)),
        global_batch_size=32,
        micro_batch_size=8,
        micro_batches=4,
        window=WindowPlan(4, "stash"),
    )
    assert describe_plan_drawing(plan).stages[0].rows == (8, 8)


def test_a_device_of_several_stages_is_divided() -> None:
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), (2, 2, (0,)), (3, 3, (1,)), schedule="interleaved-1f1b:v=2")
    drawing = describe_plan_drawing(plan)
    devices = boxes(drawing, "stage")[4:]
    assert [width for _, width in devices] == [49, 49, 49, 49]
    assert ">stages 0, 2</text>" in draw_plan(drawing)


def test_virtual_workers_have_their_layers_below_one_another() -> None:
    stages = (DrawnStage(0, 1, (0,), (1,), 0), DrawnStage(2, 2, (1,), (1,), 0), DrawnStage(0, 2, (2,), (1,), 1))
    rects = [rect for rect in Page(draw_plan(PlanDrawing(stages))).named("rect") if rect.get("class") == "stage"]
    assert [(rect["x"], rect["y"]) for rect in rects] == [("0.00", "18"), ("600.00", "18"), ("0.00", "70")]


def test_a_cluster_alone_has_its_memory_and_its_links() -> None:
    kinds = {"fast": DeviceKind(memory=16e9, speed=1.0), "slow": DeviceKind(memory=8e9, speed=0.5)}
    servers = (Server.of_kinds("a", [("fast", 1), ("slow", 1)]), Server.of_kinds("b", [("slow", 1)]))
    links = {("a", "b"): Link(2e9, 1e-5)}
    cluster = Cluster(servers, None, Link(1e11, 5e-6), Link(3e9, 2e-5), links, kinds)
    drawing = describe_plan_drawing(None, cluster)
    assert drawing.notes == (
        "a fast has 16 GB, a slow has 8 GB",
        "inside a server 100 GB/s, latency 5 µs",
        "between servers 3 GB/s, latency 20 µs",
        "a to b: 2 GB/s, latency 10 µs",
    )
    text = draw_plan(drawing)
    assert boxes(drawing, "stage") == []
    assert len(boxes(drawing, "free")) == 3
    assert "device 0 fast" in text
    assert 'class="link"' in text


@pytest.mark.parametrize(("servers", "each"), [(1, 1), (2, 4), (9, 1), (3, 20), (40, 2), (16, 16), (100, 8)])
def test_no_server_and_no_device_is_beyond_the_edge(servers: int, each: int) -> None:
    cluster = Cluster(tuple(Server(f"server{i}", each) for i in range(servers)), 1000, Link(1, 0), Link(1, 0))
    drawing = describe_plan_drawing(make_plan((0, 2, tuple(range(servers * each)))), cluster)
    assert len(boxes(drawing, "server")) == servers
    assert len(boxes(drawing, "stage")) == 1 + servers * each
    for kind in ("server", "stage"):
        assert all(left >= 0 and left + width <= 902 for left, width in boxes(drawing, kind))


def test_names_are_escaped() -> None:
    text = draw_plan(
        PlanDrawing((DrawnStage(0, 0, (0,), (1,)),), (DrawnServer("<a>", (0,)),), ("<b>",), notes=("<c>",))
    )
    assert Page(text).open == []
    assert not any(name in text for name in ("<a>", "<b>", "<c>"))


def test_the_page_of_a_simulated_step_has_the_plan_on_its_servers(tmp_path: Path) -> None:
    profile, cluster = make_profile((1, 2), (1, 1)), make_cluster(2)
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), micro_batches=2, micro_batch_size=4, global_batch_size=8)
    dapple.simulate(plan, profile, cluster).save(tmp_path / "s.html")
    text = (tmp_path / "s.html").read_text()
    assert text.count('<svg class="plan"') == 1
    assert f">{cluster.servers[0].name}</text>" in text
    assert ">stage 1, 4 rows</text>" in text
