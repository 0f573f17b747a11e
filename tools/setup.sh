#!/bin/bash
# Installs the companion into the Python that is there, as make does into .venv: for Binder, and with
# "gpu" for Colab. The lock is for whole environments, so a fresh one is expected.
set -eu
cd "$(dirname "$0")/.."
pip="python3 -m pip install --quiet --disable-pip-version-check"
build=$(mktemp)
sed -nE '/^(setuptools|wheel)==/,/[^\\]$/p' requirements.lock > "$build"
$pip --no-deps --require-hashes --requirement "$build"
$pip --no-deps --no-build-isolation --require-hashes --requirement requirements.lock
$pip --no-warn-conflicts --requirement requirements-torch.lock
$pip --no-deps --no-build-isolation --editable .
if [ "${1:-}" = gpu ]; then
    extra=$(python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["gpu"])')
    $pip --no-deps $extra
fi
