#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Everything that has to pass, in a fresh clone and with or without a GPU: the wheel, its tests, the sanitizers, the
# kernels' registers and spills, lint, the source distribution. PYTHON names the interpreter (default: python3).
# All that it makes lies in build/test.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$PWD/build/test
python=$work/venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

step() { printf '\n== %s (after %d s)\n' "$1" "$SECONDS"; }

step "Build the wheel and install it in an environment of its own"
rm -rf "$work"
"${PYTHON:-python3}" -m venv "$work/venv"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" .
wheel=$(echo "$work"/dist/metrale-*.whl)
"$python" -m pip install --quiet "$wheel[test,lint]"

step "Demo"
"$work/venv/bin/metrale" info
"$work/venv/bin/metrale" demo tests/data/tiny-v41.gguf

step "A browser for the tests of the audit's page"
missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v chromedriver >/dev/null || missing+=(chromium-driver)
if [ ${#missing[@]} -gt 0 ]; then
    # As root on Debian only; where it cannot be had, those tests are skipped and say so.
    export DEBIAN_FRONTEND=noninteractive
    { timeout 60 apt-get -q update && timeout 240 apt-get -qy install --no-install-recommends "${missing[@]}"; } \
        >"$work/apt.log" 2>&1 || echo "not installed: ${missing[*]}; see $work/apt.log"
fi

step "Tests; those marked gpu are skipped where there is no GPU"
"$work/venv/bin/pytest" --quiet --durations 5

step "Kernel tests under the address and undefined-behaviour sanitizers"
"$python" tools/sanitize.py

step "Every kernel for every architecture: no spill or stack frame that was not there before"
"$python" tools/kernel_report.py --check benchmarks/kernel_resources.json

step "Lint"
PATH=$work/venv/bin:$PATH tools/lint.sh

step "The source distribution, and the wheel that it gives"
if [ -n "$(git status --porcelain 2>&1)" ]; then
    echo "skipped: a source distribution holds what is committed, and this tree differs from it"
else
    "${PYTHON:-python3}" -m venv "$work/build"
    "$work/build/bin/python" -m pip install --quiet build
    "$work/build/bin/python" -m build --outdir "$work/sdist" . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
    "$python" tools/same_wheel.py "$wheel" "$work"/sdist/metrale-*.whl
fi

step "All passed"
