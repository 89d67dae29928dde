#!/usr/bin/env bash
# Build the wheel, install it into an environment of its own, and run it outside the checkout.
#
#     scripts/check_wheel.sh [PYTHON]    # an interpreter whose environment has the dependencies
#
# The new environment sees the dependencies of PYTHON's, but not the checkout that is installed there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-.venv/bin/python}")
case $python in /*) ;; *) python=$PWD/$python ;; esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git archive --format=tar HEAD | (mkdir "$scratch/source" && tar -x -C "$scratch/source")
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch" "$scratch/source"
"$python" -m venv "$scratch/venv"
own=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/dependencies.pth"
"$scratch/venv/bin/python" -m pip install --quiet --no-deps "$scratch"/*.whl
cd "$scratch"
found=$(venv/bin/python -c 'import compressor, exporters, strategies; print(compressor.__file__)')
case $found in
    "$own"/*) ;;
    *) echo "the wheel is not what runs: compressor comes from $found" >&2; exit 1 ;;
esac
venv/bin/moe-compress --version
venv/bin/moe-compress demo --quick
