#!/usr/bin/env bash
# Test other versions of Python, TensorFlow, Keras and NumPy: scripts/matrix.sh [--jobs] [CORNER ...], all corners without
# arguments. Each corner is an environment of its own, .matrix/CORNER, made from the package registry. Its tests are those
# of TensorFlow's internals, of equality with one device, and of Keras models.
# The corners of other Pythons also test what Python's version may change: the command line, file formats, schedules.
# --jobs: build Horovod and the native exchanges in each environment, and test jobs of several processes instead.
# A corner whose Python is neither on PATH nor one of pyenv's is skipped with a message.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

corners=(oldest python3.10 python3.12 python3.13)
declare -A packages=(
    [oldest]="tensorflow-cpu==2.17.* keras==3.9.* numpy==1.26.*"
    [python3.10]="tensorflow-cpu==2.17.* keras==3.9.* numpy==1.26.*"
    [python3.12]="tensorflow-cpu==2.19.*"
    [python3.13]="tensorflow-cpu keras numpy"
)
tests=(tests/dapple_tf/test_internals.py tests/equality tests/dapple_tf/keras)
python_tests=(tests/graph_passes tests/profiler tests/dapple_tf/commands)

# Print the path of the interpreter of this name; fail if it is not found. One of pyenv's may be on PATH and not run.
find_python() {
    local found
    for found in "$(command -v "$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${1#python}"*/bin/"$1"; do
        if "$found" -c "import ensurepip, venv" 2>/dev/null; then
            echo "$found"
            return
        fi
    done
    return 1
}

jobs=
if [[ ${1:-} == --jobs ]]; then
    jobs=1 tests=(tests/dapple_tf/distributed tests/dapple_tf/launcher) python_tests=()
    shift
fi
(($#)) || set -- "${corners[@]}"
for corner in "$@"; do
    [[ -n "${packages[$corner]:-}" ]] || { echo "there is no corner $corner; there are ${corners[*]}" >&2; exit 2; }
done
failed=0 skipped=()
for corner in "$@"; do
    interpreter=${PYTHON:-python3} chosen=("${tests[@]}")
    if [[ $corner == python* ]]; then
        interpreter=$corner chosen+=("${python_tests[@]}")
    fi
    if ! base=$(find_python "$interpreter"); then
        echo "corner $corner is skipped: $interpreter with the module venv is neither on PATH nor one of pyenv's" >&2
        skipped+=("$corner")
        continue
    fi
    folder=.matrix/$corner python=.matrix/$corner/bin/python
    echo "Installing ${packages[$corner]} into $folder ..." >&2
    [[ -x $python ]] || "$base" -m venv "$folder"
    read -ra wanted <<<"${packages[$corner]}"
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[cpu,test]" "${wanted[@]}"
    if [[ -n $jobs ]]; then
        "$python" -m dapple_tf.distributed.horovod
    fi
    "$python" -c "
import platform
from importlib.metadata import version
found = {'Python': platform.python_version(), 'TensorFlow': version('tensorflow-cpu'), 'Keras': version('keras'),
         'NumPy': version('numpy')}
print('$corner:', ', '.join(f'{name} {number}' for name, number in found.items()), flush=True)
"
    HYPOTHESIS_PROFILE=ci TF_CPP_MIN_LOG_LEVEL=3 "$python" -m pytest -q -n "${WORKERS:-2}" -m "not slow" \
        -p no:cacheprovider "${chosen[@]}" || failed=1
done
if ((${#skipped[@]} == $#)); then
    echo "no corner was tested" >&2
    failed=1
fi
exit $failed
