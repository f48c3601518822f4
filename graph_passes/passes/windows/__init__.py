"""The passes of asynchronous windows."""
