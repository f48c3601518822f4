"""The wheel: what it contains and requires, and that it works installed, away from the checkout."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dapple_tf.frontend.tensorflow_version import NEEDED
from tests.packaging.environments import Environment, check, run
from tests.paths import ROOT

# A model and its training, as a user writes them outside the checkout.
PROGRAM = '''
import keras
import numpy as np

import dapple_tf as dapple


def tiny():
    """Two dense layers that learn a line."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh", name="one"), keras.layers.Dense(1, name="two")]
    model = keras.Sequential([keras.Input((1,)), *layers], name="net")
    x = np.linspace(-1, 1, 16, dtype="float32")[:, None]
    loss = lambda x, y: keras.ops.mean((model(x) - y) ** 2)
    return dapple.Workload(loss, keras.optimizers.Adam(0.05), [(x, 2 * x)] * 20)


if __name__ == "__main__":
    dapple.init(2)
    workload = tiny()
    step = dapple.pipeline(workload.loss_fn, optimizer=workload.optimizer, stages=["two"], micro_batches=4)
    losses = [float(step(*batch)) for batch in workload.dataset]
    print(dapple.__file__)
    print(losses[0], losses[-1])
'''


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the checkout, with the program."""
    (tmp_path / "tiny.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def read_requirements(wheel: Path, extra: str) -> dict[str, Requirement]:
    """Return what the wheel requires with the extra, and not without it ("": what it always requires)."""
    found = [Requirement(line) for line in read_metadata(wheel).get_all("Requires-Dist", [])]
    always = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
    wanted = always if not extra else [r for r in found if r not in always and r.marker.evaluate({"extra": extra})]
    return {requirement.name: requirement for requirement in wanted}


def test_the_wheel_contains_one_package_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    contained = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    copied = wheel.parents[1]  # the copy of the checkout that it was built from
    expected = {
        path.relative_to(copied).as_posix()
        for path in (copied / "dapple_tf").rglob("*")
        if path.suffix in (".py", ".h", ".cc", ".sh") or path.name == "py.typed"
    }
    (library,) = contained - expected  # the planner's search, compiled for this machine
    assert re.fullmatch(r"dapple_tf/simulator/native/planner\..*(so|pyd)", library)
    assert expected <= contained
    assert {"dapple_tf/py.typed", "dapple_tf/graph_passes/ir/graph.py", "dapple_tf/profiler/profile.py"} <= contained


def test_the_wheel_without_extras_requires_no_tensorflow_but_keras(wheel: Path) -> None:
    names = set(read_requirements(wheel, ""))
    assert "keras" in names
    assert not [name for name in names if "tensorflow" in name or name.startswith("tf-")]


@pytest.mark.parametrize(
    ("extra", "name", "extras"), [("cpu", "tensorflow-cpu", set()), ("gpu", "tensorflow", {"and-cuda"})]
)
def test_each_extra_requires_a_tensorflow_that_the_import_accepts(
    wheel: Path, extra: str, name: str, extras: set[str]
) -> None:
    requirements = read_requirements(wheel, extra)
    assert set(requirements) == {name}
    assert requirements[name].extras == extras
    assert str(requirements[name].specifier) == f">={NEEDED}"


def test_setup_py_imports_neither_tensorflow_nor_the_package() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['setup.py', '--quiet', '--version']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
        "print(sorted({'tensorflow', 'keras', 'numpy', 'dapple_tf'} & set(sys.modules)))\n"
    )
    version, imported = check(run([sys.executable, "-c", program], ROOT, 60)).splitlines()[-2:]
    assert version[0].isdigit()
    assert imported == "[]"


@pytest.mark.always  # the only one that trains with the wheel
def test_a_program_outside_the_checkout_trains_with_the_installed_wheel(
    environment: Environment, elsewhere: Path
) -> None:
    origin, losses = check(environment.run("python", "tiny.py", folder=elsewhere, timeout=120)).splitlines()[-2:]
    assert Path(origin) == environment.site_packages / "dapple_tf" / "__init__.py"
    first, last = map(float, losses.split())
    assert last < first / 2


def test_the_installed_command_trains_a_model_file_outside_the_checkout(
    environment: Environment, elsewhere: Path
) -> None:
    options = ("--stages", "2", "--micro-batches", "4", "--schedule", "dapple-a", "--steps", "3")
    done = environment.run("dapple", "train", "tiny.py:tiny", *options, "--json", folder=elsewhere, timeout=120)
    result = json.loads(check(done).splitlines()[-1])
    assert result["steps"] == 3


def test_the_installed_command_trains_an_example_beside_files_named_like_our_folders(
    environment: Environment, tmp_path: Path
) -> None:
    for name in ("profiler", "graph_passes", "examples", "models"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')")
    sizes = ("--set", "layers=2", "--set", "width=16", "--set", "heads=2", "--set", "context=12")
    options = (*sizes, "--batch-size", "8", "--stages", "2", "--micro-batches", "2", "--steps", "2", "--json")
    done = environment.run("dapple", "train", "dapple_tf.examples:gpt", *options, folder=tmp_path, timeout=120)
    assert json.loads(check(done).splitlines()[-1])["steps"] == 2


def test_the_installed_command_prints_its_help_and_version(
    environment: Environment, wheel: Path, elsewhere: Path
) -> None:
    assert "--global-batch-size" in check(environment.run("dapple", "plan", "--help", folder=elsewhere, timeout=60))
    told = check(environment.run("dapple", "--version", folder=elsewhere, timeout=60))
    assert told.split()[-1] == read_metadata(wheel)["Version"]
