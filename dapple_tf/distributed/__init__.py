"""Train as the ranks of a Horovod job: join it, exchange tensors, hold the variables of its stages, end together."""
