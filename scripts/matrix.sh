#!/usr/bin/env bash
# Test other versions of TensorFlow, Keras and NumPy: scripts/matrix.sh [CORNER ...], all corners without arguments.
# Each corner is an environment of its own, .matrix/CORNER, made from the package registry. Its tests are those of
# TensorFlow's internals, of equality with one device, and of Keras models; jobs of several processes are not in them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A packages=(
    [oldest]="tensorflow-cpu==2.17.* keras==3.12.* numpy==1.26.*"
    [middle]="tensorflow-cpu==2.19.*"
    [newest]="tensorflow-cpu keras numpy"
)
tests=(tests/dapple_tf/test_internals.py tests/equality tests/dapple_tf/keras)
failed=0
(($#)) || set -- oldest middle newest
for corner in "$@"; do
    [[ -n "${packages[$corner]:-}" ]] || { echo "there is no corner $corner; there are ${!packages[*]}" >&2; exit 2; }
done
for corner in "$@"; do
    folder=.matrix/$corner python=.matrix/$corner/bin/python
    echo "Installing ${packages[$corner]} into $folder ..." >&2
    [[ -x $python ]] || "${PYTHON:-python3}" -m venv "$folder"
    read -ra wanted <<<"${packages[$corner]}"
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[cpu,test]" "${wanted[@]}"
    "$python" -c "
import platform
from importlib.metadata import version
found = {'Python': platform.python_version(), 'TensorFlow': version('tensorflow-cpu'), 'Keras': version('keras'),
         'NumPy': version('numpy')}
print('$corner:', ', '.join(f'{name} {number}' for name, number in found.items()), flush=True)
"
    HYPOTHESIS_PROFILE=ci TF_CPP_MIN_LOG_LEVEL=3 "$python" -m pytest -q -n "${WORKERS:-2}" -m "not slow" \
        -p no:cacheprovider "${tests[@]}" || failed=1
done
exit $failed
