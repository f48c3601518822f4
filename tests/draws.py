"""How many examples property tests draw where the profile's number is too many for ``make test``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def are_few() -> bool:
    """Return whether tests draw few examples, as ``make test`` does (the profile ``ci``)."""
    return settings.get_current_profile_name() == "ci"


def draw(few: int, many: int | None = None, **options: Any) -> settings:
    """Return settings with ``few`` examples in ``make test``, else with ``many``, by default the profile's number.

    ``options``: other settings of Hypothesis.
    """
    return settings(max_examples=few if are_few() else many or settings.default.max_examples, **options)
