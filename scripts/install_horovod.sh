#!/usr/bin/env bash
# Builds Horovod against the TensorFlow of a virtual environment; nothing is done where it already works.
# Usage: scripts/install_horovod.sh [PYTHON]          PYTHON: default .venv/bin/python
#
# `pip install horovod` alone does not do: Horovod must be compiled beside the TensorFlow it will serve, and 0.28.1
# includes XLA headers that TensorFlow 2.16 and later no longer ship. A build for CPUs uses nothing of them, so the
# empty headers in horovod_shim stand in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${1:-.venv/bin/python}"
packages=(cmake g++ make openmpi-bin libopenmpi-dev)
requirement="$(sed -n 's/.*"\(horovod==[0-9.]*\)".*/\1/p' setup.py)"

say() { echo "$*" >&2; }

horovod_works() {
    # An own directory, so that nothing of this one is imported by chance.
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
        say "Horovod needs $missing and there is no apt-get here: install CMake, a C++ compiler and Open MPI with its"
        say "headers by this system's package manager, then try again."
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        say "Horovod needs $missing: sudo apt-get install ${packages[*]}, then try again."
        return 1
    fi
    say "Installing ${packages[*]} (for $missing) ..."
    export DEBIAN_FRONTEND=noninteractive
    # The lists of packages may be missing or old: they are fetched only if the first attempt fails.
    local install=(apt-get install -y --no-install-recommends "${packages[@]}")
    "${install[@]}" >"$scratch/apt.log" 2>&1 || { apt-get update && "${install[@]}"; } >"$scratch/apt.log" 2>&1 || {
        tail -n 15 "$scratch/apt.log" >&2
        say "apt-get failed (above): install ${packages[*]} by hand, then try again."
        return 1
    }
    missing="$(missing_tools)"
    [ -z "$missing" ] || { say "Still not on PATH after the installation: $missing"; return 1; }
}

build() { # build [pip's options]
    # MAKEFLAGS: Horovod would run eight compilers at once, and a calling make's job server is none of its business.
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
    # The compiler's own complaint may be far above pip's last words.
    grep -nE -A 3 'error:|Error [0-9]|CMake Error' "$kept" | head -n 20 >&2 || true
    say "..."
    tail -n 25 "$kept" >&2
    say "$1 The whole log: $kept"
    exit 1
}

[ -n "$requirement" ] || { say "setup.py names no \"horovod==VERSION\": put it back under extras_require."; exit 1; }
# Not resolved (-s): a virtual environment's python is a link, and what it links to has none of its packages.
command -v "$python" >/dev/null || { say "There is no $python: run make train or make test first."; exit 1; }
python="$(realpath -s "$(command -v "$python")")"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# A link, since neither CMake nor g++ takes a path with a space among its flags.
ln -s "$PWD/scripts/horovod_shim" "$scratch/shim"
touch "$scratch/build.log"

horovod_works && exit 0
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' || {
    say "$python has no TensorFlow, which Horovod is built against: run make train or make test first."
    exit 1
}
install_tools

say "Building $requirement for $python (3 to 6 minutes; seconds if pip has kept an earlier build) ..."
"$python" -m pip install --quiet --disable-pip-version-check 'setuptools<81' wheel >"$scratch/build.log" 2>&1 ||
    fail "pip could not install what the build needs (above)."
advice="Look at its first error; 'Killed' or 'No space left' mean too little memory or disk."
build || fail "The build failed (above). $advice"
if ! horovod_works; then
    say "The installed build does not work here (pip may have kept one made for another TensorFlow): building anew ..."
    build --no-cache-dir --force-reinstall --no-deps || fail "The build failed (above). $advice"
    if ! horovod_works; then
        cat "$scratch/import.log" >>"$scratch/build.log"
        fail "Horovod was built but cannot be imported (above)."
    fi
fi
say "Horovod works ($requirement)."
