"""A link between devices or servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link: ``bandwidth`` in bytes per second, ``latency`` in seconds."""

    bandwidth: float
    latency: float
