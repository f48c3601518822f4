"""The simulator: what a plan costs, executed action by action under the cost model."""
