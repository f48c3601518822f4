"""The fuzz of all readers, with few inputs: documented errors only, and none that takes long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_mutations import LONGEST, mutate
from benchmarks.fuzz_readers import NAMES, Reader


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_damaged_data(name: str) -> None:
    found = fuzz.fuzz(name, 80, seed=1)
    assert found.wrong == ()
    assert found.slowest_seconds < 2
    assert found.inputs == 80


def test_an_input_is_repeated_by_its_number() -> None:
    seeds = [b"some data", b"other"]
    inputs = [mutate(random.Random(f"0/plan/{number}"), seeds) for number in range(200)]
    assert inputs == [mutate(random.Random(f"0/plan/{number}"), seeds) for number in range(200)]
    assert len(set(inputs)) > 100
    assert max(map(len, inputs)) <= LONGEST


def test_an_undocumented_error_misses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes, path: Path) -> None:
        if data != b"good":
            raise KeyError(data)

    monkeypatch.setattr(fuzz, "reader_named", lambda name: Reader([b"good"], read, (ValueError,)))
    found = fuzz.fuzz("any", 20, 0)
    assert found.wrong[0].startswith("KeyError (input ")
    row = fuzz._row("any", found)
    assert not row.ok
    assert "KeyError (input" in row.measured
