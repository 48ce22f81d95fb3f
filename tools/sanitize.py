#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the kernels' tests on host kernels that are built with the address and undefined-behaviour sanitizers.

    sanitize.py [PYTEST ARGUMENTS]

Twice: with shared memory as it is on the host, one copy a thread, and as plain globals of one thread, which the
address sanitizer watches.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from metrale.gpu import hostlib, sources

KERNEL_TESTS = str(Path(__file__).resolve().parents[1] / "tests" / "ops")


def main(arguments: list[str]) -> int:
    tool = hostlib.build_tool()
    kernels = sorted(sources.CUDA_DIR.glob("*.cu"))
    with tempfile.TemporaryDirectory(prefix="metrale-") as folder:
        for static_shared in (False, True):
            library = Path(folder) / f"{'static' if static_shared else 'thread_local'}.so"
            tool.build(kernels, library, sanitize="address,undefined", static_shared=static_shared)
            print(f"-- {library.stem} shared memory", flush=True)
            environment = {
                **os.environ,
                **tool.sanitizer_environment(),
                "METRALE_BACKEND": "host",
                "METRALE_HOST_LIBRARY": str(library),
            }
            # -P: the source tree, where the package lies without its compiled parts, stays off the path.
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", *(arguments or [KERNEL_TESTS])]
            command += ["--capture=sys"]  # what a sanitizer writes before it ends the process is seen
            done = subprocess.run(command, env=environment)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
