"""The list of slow tests names tests that exist."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = (ROOT / "tests" / "slow_tests.txt").read_text().splitlines()


@pytest.mark.parametrize("path", sorted({line.split("::")[0] for line in LISTED}))
def test_every_listed_test_is_in_its_file(path: str) -> None:
    text = (ROOT / path).read_text()
    for line in LISTED:
        file, name = line.split("::")
        assert file != path or f"def {name.split('[')[0]}(" in text
