"""Planners: from a profile, a cluster and a global batch size to a plan. Each planner is a file."""
