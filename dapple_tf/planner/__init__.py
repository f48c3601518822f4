"""Plans, and ways to make them. Each planner is a file."""
