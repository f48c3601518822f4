"""``import dapple_tf`` where TensorFlow is missing, has a wrong version, or tells no version.

All run in a real environment that has dapple_tf from its wheel and no TensorFlow. A test adds a folder with a package
``tensorflow`` that fails when it is imported, and with the metadata of the distributions that would have installed it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple_tf.frontend.tensorflow_version import NEEDED
from tests.packaging.environments import Environment, check

IMPORT = """
try:
    import dapple_tf
except ImportError as error:
    print(error.name, error)
else:
    print("imported")
"""
FOR_CPUS, FOR_GPUS = "pip install 'dapple_tf[cpu]'", "pip install 'dapple_tf[gpu]'"


def add_tensorflow(folder: Path, *distributions: str) -> None:
    """Add the package ``tensorflow`` and the metadata of distributions, each given as name-version."""
    package = folder / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('TensorFlow was imported')\n")
    for distribution in distributions:
        add_metadata(folder, distribution)


def add_metadata(folder: Path, distribution: str) -> None:
    name, _, version = distribution.rpartition("-")
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def import_dapple_tf(environment: Environment, *added: Path) -> str:
    """Import dapple_tf with folders added to sys.path, before the environment's own; return what came of it."""
    variables = {"PYTHONPATH": ":".join(map(str, added))}
    return check(environment.run("python", "-c", IMPORT, folder=environment.folder, timeout=60, variables=variables))


def test_the_import_fails_without_tensorflow_and_tells_the_command_to_run(
    environment_without_tensorflow: Environment,
) -> None:
    message = import_dapple_tf(environment_without_tensorflow)
    assert message.startswith(f"tensorflow dapple_tf needs TensorFlow {NEEDED} or newer, and none is installed for ")
    assert str(environment_without_tensorflow.python) in message
    assert FOR_CPUS in message
    assert FOR_GPUS in message


def test_the_command_line_fails_without_tensorflow_and_ends_with_the_same_message(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    done = environment_without_tensorflow.run("dapple", "--help", folder=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: dapple_tf needs TensorFlow {NEEDED} or newer, and none is installed")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tensorflow", "2.15.1"),
        ("tensorflow-cpu", "2.16.2"),
        ("tensorflow-rocm", "2.14.0"),
        ("intel-tensorflow", "2.14.0"),
        ("tf-nightly", "2.16.0.dev20240301"),
        ("tensorflow", "2.2.1"),  # not 2.21
        ("tensorflow", "1.20.0"),
    ],
)
def test_the_import_fails_with_another_version_and_tells_it(
    environment_without_tensorflow: Environment, tmp_path: Path, name: str, version: str
) -> None:
    add_tensorflow(tmp_path, f"{name}-{version}")
    message = import_dapple_tf(environment_without_tensorflow, tmp_path)
    assert message.startswith(
        f"tensorflow dapple_tf needs TensorFlow {NEEDED} or newer, and {tmp_path} has {name} {version}: "
        f"run pip uninstall {name}, then {FOR_CPUS}"
    )
    assert FOR_GPUS in message


def test_a_right_version_installed_over_a_wrong_one_is_refused(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    add_tensorflow(tmp_path, "tensorflow-2.15.1", f"tensorflow-cpu-{NEEDED}.0")
    message = import_dapple_tf(environment_without_tensorflow, tmp_path)
    assert f"{tmp_path} has tensorflow 2.15.1 and tensorflow-cpu {NEEDED}.0" in message
    assert "run pip uninstall tensorflow tensorflow-cpu, then" in message


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"])
@pytest.mark.parametrize("version", [f"{NEEDED}.0", f"{NEEDED}.3rc1", f"{NEEDED}.0.dev20260301", "2.21.0"])
def test_the_needed_version_is_accepted_and_not_imported(
    environment_without_tensorflow: Environment, tmp_path: Path, name: str, version: str
) -> None:
    add_tensorflow(tmp_path, f"{name}-{version}")
    assert import_dapple_tf(environment_without_tensorflow, tmp_path) == "imported\n"


def test_a_version_that_was_not_tested_is_accepted_with_a_warning(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    add_tensorflow(tmp_path, "tensorflow-2.210.0")
    variables = {"PYTHONPATH": str(tmp_path)}
    done = environment_without_tensorflow.run(
        "python", "-c", IMPORT, folder=environment_without_tensorflow.folder, timeout=60, variables=variables
    )
    assert done.stdout == "imported\n"
    assert (
        "DappleWarning: dapple_tf was tested with TensorFlow 2.17 to 2.21, not with tensorflow 2.210.0" in done.stderr
    )


def test_a_tensorflow_that_tells_no_version_is_accepted(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    add_tensorflow(tmp_path)
    assert import_dapple_tf(environment_without_tensorflow, tmp_path) == "imported\n"
    (tmp_path / "tensorflow-2.15.1.dist-info").mkdir()  # METADATA is missing
    assert import_dapple_tf(environment_without_tensorflow, tmp_path) == "imported\n"


def test_the_version_of_another_folder_does_not_count(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    add_tensorflow(tmp_path / "first", f"tensorflow-{NEEDED}.0")
    add_tensorflow(tmp_path / "second", "tensorflow-2.15.1")
    folders = (tmp_path / "first", tmp_path / "second")
    assert import_dapple_tf(environment_without_tensorflow, *folders) == "imported\n"
    assert "has tensorflow 2.15.1" in import_dapple_tf(environment_without_tensorflow, *reversed(folders))


def test_metadata_apart_from_its_package_counts_where_the_package_has_none(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    add_tensorflow(tmp_path / "source")
    add_metadata(tmp_path / "editable", "tensorflow-2.15.1")
    message = import_dapple_tf(environment_without_tensorflow, tmp_path / "source", tmp_path / "editable")
    assert f"{tmp_path / 'source'} has tensorflow 2.15.1" in message


def test_a_folder_that_an_uninstallation_left_is_no_tensorflow(
    environment_without_tensorflow: Environment, tmp_path: Path
) -> None:
    (tmp_path / "tensorflow" / "python").mkdir(parents=True)
    assert "none is installed" in import_dapple_tf(environment_without_tensorflow, tmp_path)
