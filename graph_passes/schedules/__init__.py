"""Schedules: the order in which each stage runs its forwards and backwards; policies that build them; their text."""
