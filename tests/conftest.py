"""Settings of all tests: how many examples Hypothesis draws, which tests are slow, and which share a process.

The environment variable HYPOTHESIS_PROFILE is ``ci`` (the same few examples every time) or ``dev`` (the default). This
file does not import TensorFlow, since many tests need none: see ``tests.tensorflow_start``.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.durations import find_slow, group_of, read_durations, seconds_of, write_durations

hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=40, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_SECONDS = "processor seconds"  # the name of a test's property in its report
_BEGIN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write the tests' durations to durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    # Collect garbage less often: this saves a tenth of the time. Memory does not grow by it, since nearly all objects
    # of TensorFlow and Keras stay in use anyway.
    gc.set_threshold(10_000, 20, 20)
    # With pytest-xdist only the main process records: it gets the reports of all worker processes.
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark slow tests. With pytest-xdist, put the tests that start jobs first, then the groups that take longest."""
    durations = read_durations()
    slow = find_slow((item.nodeid for item in items if not _shares_launch(item)), durations)
    for item in items:
        if item.nodeid in slow and not item.get_closest_marker("always"):
            item.add_marker(pytest.mark.slow)
    yield  # here pytest removes the tests that are deselected by their marks
    if hasattr(config, "workerinput"):
        seconds: Counter[str] = Counter()
        for item in items:
            seconds[group_of(item.nodeid)] += seconds_of(item.nodeid, durations)
        items.sort(key=lambda item: (group_of(item.nodeid) != "jobs", -seconds[group_of(item.nodeid)]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Free the tests that were deselected: each trace of a model walks over all objects of the process."""
    if hasattr(session.config, "workerinput"):
        gc.collect()


def _shares_launch(item: pytest.Item) -> bool:
    """Return whether a test uses a job that is launched once for several tests, by the first one that runs."""
    return isinstance(item, pytest.Function) and "launches" in item.fixturenames


@pytest.hookimpl(optionalhook=True)  # pytest-xdist is not always used
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each process of pytest-xdist whole groups of tests, in the collected order."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compile the planner's C++ library once, before worker processes start; else each of them would compile it."""
    from dapple_tf.simulator.native.library import load_library

    load_library()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure a test, and forget the custom gradients of its graphs after it."""
    item.stash[_BEGIN] = _processor_seconds()
    result = yield
    _forget_custom_gradients()
    return result


def _forget_custom_gradients() -> None:
    """Free the graphs in which ``tf.custom_gradient`` has registered gradients.

    Keras's optimizers do so in each trace, and TensorFlow keeps what is registered, with its graph, until the process
    ends. A process would hold millions of objects after some hundred tests; each trace of a model walks over all.
    """
    if (ops := sys.modules.get("tensorflow.python.framework.ops")) is not None:
        registry = ops.gradient_registry._registry
        for name in [name for name in registry if name.startswith("CustomGradient-")]:
            del registry[name]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if not _shares_launch(item):
        item.user_properties.append((_SECONDS, _processor_seconds() - item.stash[_BEGIN]))


def _processor_seconds() -> float:
    """Return the processor time (seconds) of this process and of the child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class _Recorder:
    """Pytest plugin that writes the durations of the tests that have passed."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._measured: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self._passed:
            for name, value in report.user_properties:
                if name == _SECONDS:
                    self._measured[report.nodeid] = value

    def pytest_sessionfinish(self) -> None:
        write_durations(read_durations() | self._measured)
