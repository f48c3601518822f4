"""The C++ part of the simulator and of planner "best": the engine of steps, and the search by simulated annealing."""
