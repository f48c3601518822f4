#!/usr/bin/env bash
# Builds Horovod against the TensorFlow of a virtual environment; does nothing if Horovod already works there.
# Usage: install.sh PYTHON; python -m dapple_tf.distributed.horovod runs it.
#
# `pip install horovod` alone fails: Horovod must be compiled in the environment of the TensorFlow that it will be used
# with, and 0.28.1 includes XLA headers (in xla_mpi_ops.cc) that TensorFlow 2.16 and later no longer contain. Only a build
# for GPUs uses what they declared, so the empty headers of the folder shim come before TensorFlow's own.
set -euo pipefail
python="$1"
shim="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/shim"
packages=(cmake g++ make openmpi-bin libopenmpi-dev)
requirement="horovod==0.28.1" # setup.py reads it from here

say() { echo "$*" >&2; }

horovod_works() {
    # Run in an empty folder, so that no module of the current one is imported by accident.
    (cd "$scratch" && TF_CPP_MIN_LOG_LEVEL=3 "$python" -c "
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built()") >"$scratch/import.log" 2>&1
}

missing_tools() {
    local tool missing=()
    for tool in cmake g++ make mpirun mpicxx; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    echo "${missing[*]}"
}

install_tools() {
    local missing
    missing="$(missing_tools)"
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null; then
        say "Horovod needs $missing, and this system has no apt-get: install CMake, a C++ compiler and Open MPI"
        say "with its headers by the system's package manager, then try again."
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        say "Horovod needs $missing: sudo apt-get install ${packages[*]}, then try again."
        return 1
    fi
    say "Installing ${packages[*]} (for $missing) ..."
    export DEBIAN_FRONTEND=noninteractive
    # The package lists may be missing or old: update them only if the first attempt fails.
    local install=(apt-get install -y --no-install-recommends "${packages[@]}")
    "${install[@]}" >"$scratch/apt.log" 2>&1 || { apt-get update && "${install[@]}"; } >"$scratch/apt.log" 2>&1 || {
        tail -n 15 "$scratch/apt.log" >&2
        say "apt-get failed (see above): install ${packages[*]} by hand, then try again."
        return 1
    }
    missing="$(missing_tools)"
    [ -z "$missing" ] || { say "Still not on PATH after the installation: $missing"; return 1; }
}

build() { # build [pip's options]
    # MAKEFLAGS: one compiler per core, where Horovod would run eight; and not the job server of a make that calls this.
    # CMAKE_POLICY_VERSION_MINIMUM: CMake 4 refuses the old files of Horovod's third-party libraries without it.
    MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="-I$scratch/shim ${CXXFLAGS:-}" \
        HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        "$python" -m pip install --disable-pip-version-check --no-build-isolation "$@" "$requirement" \
        >"$scratch/build.log" 2>&1
}

fail() {
    local kept
    kept="$(mktemp "${TMPDIR:-/tmp}/horovod-build-XXXXXX.log")"
    cp "$scratch/build.log" "$kept"
    # The compiler's error message may be far above the last lines of pip's output.
    grep -nE -A 3 'error:|Error [0-9]|CMake Error' "$kept" | head -n 20 >&2 || true
    say "..."
    tail -n 25 "$kept" >&2
    say "$1 The complete log: $kept"
    exit 1
}

# Do not follow links (-s): the python of a virtual environment is a link to one that has none of its packages.
command -v "$python" >/dev/null || { say "There is no $python."; exit 1; }
python="$(realpath -s "$(command -v "$python")")"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# A link, because CMake and g++ fail if a path in their flags contains a space.
ln -s "$shim" "$scratch/shim"
touch "$scratch/build.log"

horovod_works && exit 0
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' || {
    say "$python has no TensorFlow, and Horovod is built against it: install dapple_tf[cpu] or dapple_tf[gpu] first."
    exit 1
}
install_tools

say "Building $requirement for $python (3 to 6 minutes; seconds if pip has cached an earlier build) ..."
"$python" -m pip install --quiet --disable-pip-version-check 'setuptools<81' wheel >"$scratch/build.log" 2>&1 ||
    fail "pip could not install the requirements of the build (see above)."
advice="Look at its first error; 'Killed' means too little memory, 'No space left' too little disk."
build || fail "The build failed (see above). $advice"
if ! horovod_works; then
    say "The installed build does not work here (pip may have cached it for another TensorFlow): building again ..."
    build --no-cache-dir --force-reinstall --no-deps || fail "The build failed (see above). $advice"
    if ! horovod_works; then
        cat "$scratch/import.log" >>"$scratch/build.log"
        fail "Horovod was built but cannot be imported (see above)."
    fi
fi
say "Horovod works ($requirement)."
