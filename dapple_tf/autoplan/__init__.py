"""Turn a request, with what it leaves "auto", into a plan: by a profile, an estimate and the simulator."""
