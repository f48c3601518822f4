"""Train as the ranks of a Horovod job: join it, exchange tensors, hold the variables of a stage, end together."""
