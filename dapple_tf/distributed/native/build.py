"""Compile the library of exchange ops for this TensorFlow: ``python -m dapple_tf.distributed.native.build``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from dapple_tf.distributed.native.library import COMMAND, library_path, source_files

_WITHOUT = "Jobs exchange tensors by Horovod's alltoall instead."


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why."""


def build_library(path: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Compile the library into ``path``, with the compiler ``CXX`` of the ``environment`` (default g++): 10 to 30 s.

    The file appears when it is complete. Raises BuildError if there is no compiler, or if it fails.
    """
    name = environment.get("CXX") or "g++"
    compiler = shutil.which(name, path=environment.get("PATH"))
    if compiler is None:
        raise BuildError(f"there is no C++ compiler {name!r}: install one, then {COMMAND}")
    include, *flags = tf.sysconfig.get_compile_flags()
    (source,) = (str(file) for file in source_files() if file.suffix == ".cc")
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", *flags]
            command += ["-isystem", include.removeprefix("-I"), source, "-o", str(made)]
            command += tf.sysconfig.get_link_flags()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{compiler} failed:\n{_first_errors(done.stderr)}")
            made.replace(path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror})") from error


def _first_errors(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    return "\n".join(lines[:10])


def main() -> int:
    """Compile the library unless it exists; if that fails, print why. Return 0: the library is optional."""
    path = library_path()
    if path.exists():
        return 0
    print("Building the library of native exchanges (10 to 30 seconds) ...", file=sys.stderr)
    try:
        build_library(path)
    except BuildError as error:
        print(f"The library of native exchanges is not built: {error}\n{_WITHOUT}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
