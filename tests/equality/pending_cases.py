"""Cases that do not come out as they must yet, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_LENGTH = "refused: after a slice to a length computed from the batch, shapes are not inferred"

PENDING: Mapping[str, str] = {
    "padding_to_the_longest": _LENGTH,
}
"""The reason, by the name of the case."""
