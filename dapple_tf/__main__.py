"""``python -m dapple_tf``: the command line."""

from dapple_tf.cli import main

main()
