"""The library of exchange ops is compiled where there is a compiler, and what is missing is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dapple_tf.distributed.native.build import BuildError, build_library, main
from dapple_tf.distributed.native.library import find_obstacle, library_path, source_digest, source_files
from tests.dapple_tf.distributed.native.peers import has_compiler


@pytest.mark.skipif(not has_compiler, reason="there is no g++")
def test_the_library_is_built_for_this_source_where_there_is_a_compiler(capfd: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert library_path().exists(), capfd.readouterr().err
    assert source_digest() in library_path().name
    assert find_obstacle() == ""


def test_the_source_is_part_of_the_package() -> None:
    names = [path.name for path in source_files()]
    assert names == [
        "channel.h",
        "exchange_ops.cc",
        "incoming.h",
        "mailbox.h",
        "message.h",
        "network.h",
        "peer_memory.h",
    ]


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler 'g\+\+': install one, then python -m dapple_tf\."):
        build_library(tmp_path / "made" / "x.so", {"PATH": str(tmp_path)})
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler 'absent'"):
        build_library(tmp_path / "made" / "x.so", {**os.environ, "CXX": "absent"})


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'exchange_ops.cc:1: fatal error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match="fatal error: no such header"):
        build_library(tmp_path / "made" / "x.so", {**os.environ, "CXX": str(compiler)})
    assert list((tmp_path / "made").iterdir()) == []
