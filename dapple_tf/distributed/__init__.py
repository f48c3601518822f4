"""One process per device: the Horovod job that this process is a rank of. Only this package knows Horovod."""
