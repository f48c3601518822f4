"""Measured facts: what each layer of a model costs, and what the cluster it runs on can do."""
