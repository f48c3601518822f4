#!/usr/bin/env bash
# Build the wheel and the source distribution of the committed tree into dist/, and try the wheel as a user would: in an
# environment of its own, away from the checkout, beside files named like our folders. Prints the changelog's section.
# It uploads nothing: `twine upload dist/*` does, after the version is tagged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
say() { echo "release: $*" >&2; }
fail() { say "$*"; exit 1; }

version=$(sed -n 's/^__version__ = "\([^"]*\)".*/\1/p' dapple_tf/__init__.py)
section=$(awk -v version="$version" '/^## /{found = index($0, "[" version "]")} found' CHANGELOG.md)
[[ -n $section ]] || fail "CHANGELOG.md has no section [$version], the version in dapple_tf/__init__.py: write it"
[[ -z $(git status --porcelain) ]] || fail "there are changes that are not committed (git status lists them)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "builds version $version of $(git rev-parse --short HEAD)"
git archive --prefix=source/ HEAD | tar -x -C "$work"
rm -rf dist
# The wheel is built from the source distribution: both have all files, or this fails.
"$python" -m build --outdir dist "$work/source" >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log" >&2; exit 1; }
wheel=$(echo "$PWD"/dist/*.whl)

say "installs ${wheel##*/} with the extra cpu into an empty environment (TensorFlow is large)"
"${PYTHON:-python3}" -m venv "$work/environment"
bin=$work/environment/bin
list() { find "$work/environment" -not -name '*.pyc' -not -name __pycache__ | sort; }
"$bin/python" -m pip install --quiet --disable-pip-version-check "$wheel[cpu]"
"$bin/python" -m pip check >/dev/null || fail "the requirements contradict each other: pip check says which"
mkdir "$work/away"
cd "$work/away"
touch profiler.py graph_passes.py examples.py models.py # a user's files, which must not hide ours
export TF_CPP_MIN_LOG_LEVEL=3
model=(dapple_tf.examples:gpt --set layers=2 --set width=32 --batch-size 8)
try() {
    say "dapple $*"
    "$bin/dapple" "$@" >"$work/out.log" 2>&1 || { cat "$work/out.log" >&2; fail "dapple $1 exited with $?"; }
}
try --version
try train "${model[@]}" --stages 2 --micro-batches 4 --steps 5 --checkpoint-dir run
try verify "${model[@]}" --stages 2 --micro-batches 4
try profile "${model[@]}" -o profile.json
try plan profile.json --cluster config-a:16 --global-batch-size 64 -o plan.json
try simulate plan.json --profile profile.json --cluster config-a:16 -o step.html
try train dapple_tf.examples:vgg --set width=4 --set hidden=16 --stages 2 --micro-batches 2 --batch-size 8 --steps 2

"$bin/python" -m pip uninstall --quiet --yes dapple_tf
left=$(list | grep -i dapple || true)
[[ -z $left ]] || fail "pip uninstall leaves files: $left"
say "dist/ holds what was tried:"
cd - >/dev/null
ls -1 dist
echo
echo "$section"
