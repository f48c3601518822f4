"""The planners of other systems, each by its paper."""
