"""Save training runs as checkpoints, and restore them under any plan."""
