"""Start a job on the hosts that answer, and start it again on those that are left when it fails."""
