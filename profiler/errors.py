"""Errors of the profiler's files and measurements. Each message names the file, line or field, and what to do."""

from __future__ import annotations

from graph_passes.errors import DappleError


class ProfileError(DappleError, ValueError):
    """A profile that cannot be read, measured or used."""


class ClusterError(DappleError, ValueError):
    """A description of a cluster that cannot be read or does not fit."""
