#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Style and types, with the tools of an environment in which metrale[lint] is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ruff check .
ruff format --check .
mapfile -t cython < <(find metrale tests -name '*.pyx' -o -name '*.pxd')
cython-lint "${cython[@]}"
mapfile -t cuda < <(find cuda tests -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')
clang-format --dry-run -Werror "${cuda[@]}"
mypy
# The stubs against the compiled modules; not from this folder, where the package lies without them.
mapfile -t stubs < <(find metrale -name '*.pyi' | sed 's/\.pyi$//; s,/,.,g' | sort)
config=$PWD
(cd / && stubtest --concise --mypy-config-file "$config/pyproject.toml" --allowlist "$config/tools/stubtest.txt" "${stubs[@]}")
