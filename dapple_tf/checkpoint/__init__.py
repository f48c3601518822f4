"""Save and restore training runs."""
