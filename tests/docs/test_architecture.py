"""The architecture pages agree with the code: the order of the passes, and the example graph."""

from __future__ import annotations

import inspect
import re

from dapple_tf import compiler
from dapple_tf.graph_passes.ir.graph import ROLES
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.docs.pages import written


def test_the_flow_lists_the_passes_in_the_order_in_which_they_run() -> None:
    synchronous, asynchronous = written()["docs/architecture/flow.md"].text.split("An asynchronous window", 1)
    for builder, text in ((compiler.passes, synchronous), (compiler.window_passes, asynchronous)):
        listed = re.findall(r"^\| `(dapple_tf\.graph_passes\.passes\.[\w.]+)` \|", text, re.MULTILINE)
        homes = [home_of(name) for name in re.findall(r"\b(\w+)\(", inspect.getsource(builder))]
        assert listed == [home for home in homes if home.startswith("dapple_tf.graph_passes.passes.")]


def home_of(name: str) -> str:
    """The module of a class that the compiler imports, or of the class of what one of its functions returns."""
    found = vars(compiler).get(name)
    if inspect.isfunction(found):
        found = vars(compiler).get(found.__annotations__["return"])
    return getattr(found, "__module__", "") if inspect.isclass(found) else ""


def test_the_ports_page_lists_every_role() -> None:
    page = written()["docs/architecture/ir.md"].text
    table = page[page.index("| role of a port") : page.index("Each node has an *effect*")]
    assert set(re.findall(r"`(\w+)`", table)) == set(ROLES)


def test_the_life_of_a_step_shows_the_order_of_its_schedule() -> None:
    page = written()["docs/architecture/step.md"].text
    shown = re.findall(r"^    stage \d: ((?:\d[FB]\d ?)+)", page, re.MULTILINE)
    assert "\n".join(line.strip() for line in shown) == str(ScheduleSpec.parse("dapple-a").build(2, 4))
