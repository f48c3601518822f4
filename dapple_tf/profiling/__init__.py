"""Profile a model: measured on the device at hand, or computed for another one."""
