#!/usr/bin/env bash
# Compiles the ops by which ranks exchange tensors, against the TensorFlow of a virtual environment; does nothing if they
# are there. Usage: scripts/build_exchange.sh [PYTHON]          PYTHON: default .venv/bin/python
#
# The ops are optional: without a compiler this says so and succeeds, and jobs exchange tensors by Horovod.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${1:-.venv/bin/python}"
command -v "$python" >/dev/null || { echo "There is no $python: run make train or make test first." >&2; exit 1; }
TF_CPP_MIN_LOG_LEVEL=3 exec "$python" -m dapple_tf.distributed.native.build
