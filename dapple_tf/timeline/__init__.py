"""The timeline of a step, simulated or recorded: events, critical path, files and text."""
