"""Check which TensorFlow is installed, without importing it: that would take seconds.

The base requirements of dapple_tf name no TensorFlow, since several distributions install the same module and must not
be installed over each other. The extras ``cpu`` and ``gpu`` name one each.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from dapple_tf.errors import warn_user

OLDEST, NEWEST = (2, 17), (2, 21)  # minor versions with which the tests pass; newer ones probably work
NEEDED = ".".join(map(str, OLDEST))

# The distributions that install the module `tensorflow`.
_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-aarch64",
    "tensorflow-cpu-aws",
    "intel-tensorflow",
    "intel-tensorflow-avx512",
    "tf-nightly",
    "tf-nightly-cpu",
    "tf-nightly-gpu",
    "tf-nightly-rocm",
)
_INSTALL = "pip install 'dapple_tf[cpu]', or on a machine with NVIDIA GPUs pip install 'dapple_tf[gpu]'"


def require_tensorflow() -> None:
    """Raise ImportError unless TensorFlow NEEDED or newer is installed, with what was found and what to do.

    A version that is newer than those that were tested is a warning. A TensorFlow without metadata, such as a source
    tree on sys.path, has no version to read here and is accepted.
    """
    folder = _find_tensorflow()
    if folder is None:
        raise ImportError(
            f"dapple_tf needs TensorFlow {NEEDED} or newer, and none is installed for {sys.executable}: run {_INSTALL}",
            name="tensorflow",
        )
    versions = _installed_versions(folder)
    found = " and ".join(f"{name} {version}" for name, version in versions.items())
    minors = [read_minor(version) for version in versions.values()]
    if all(minor >= OLDEST for minor in minors):
        if any(minor > NEWEST for minor in minors):
            newest = ".".join(map(str, NEWEST))
            warn_user(f"dapple_tf was tested with TensorFlow {NEEDED} to {newest}, not with {found}")
        return
    raise ImportError(
        f"dapple_tf needs TensorFlow {NEEDED} or newer, and {folder} has {found}: "
        f"run pip uninstall {' '.join(versions)}, then {_INSTALL}",
        name="tensorflow",
        path=str(folder),
    )


def read_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) for one that does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _find_tensorflow() -> Path | None:
    """Return the folder that holds the package ``tensorflow``, or None if there is no such package."""
    spec = importlib.util.find_spec("tensorflow")
    # A folder without __init__.py, as an uninstallation may leave, has a spec but no origin.
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None


def _installed_versions(folder: Path) -> dict[str, str]:
    """Return the version of each distribution of TensorFlow in ``folder``; if it has none, of those on sys.path.

    Another folder on sys.path may hold a TensorFlow that Python does not import. An editable installation, however, has
    its metadata in another folder than its package.
    """
    for path in ([str(folder)], sys.path):
        versions: dict[str, str] = {}
        for name in _DISTRIBUTIONS:
            for distribution in importlib.metadata.distributions(name=name, path=path):
                version: str | None = distribution.version  # None if its METADATA is damaged or missing
                if version is not None:
                    versions[name] = version
        if versions:
            return versions
    return {}
