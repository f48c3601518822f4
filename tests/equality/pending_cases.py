"""Cases that do not come out as they must yet, with what they do today."""

from __future__ import annotations

from collections.abc import Mapping

PENDING: Mapping[str, str] = {}
