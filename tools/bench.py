#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Benchmarks on the GPU.

    python tools/bench.py kernels    every kernel, and the MoE layer for one token, against the bytes they must move
    python tools/bench.py launch     a launch from Python, beside the C driver call and other packages

Both print a table; ``--json FILE`` also writes the results, and the table beside them as ``.md``.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.driver_calls import check
from cuda.bindings import driver

import metrale
from benchmarks import kernels, launch

BENCHMARKS = {"kernels": kernels, "launch": launch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    commit = _output("git", "rev-parse", "--short", "HEAD")
    parser.add_argument("--commit", default=commit, metavar="HASH", help=f"of what is measured (default: {commit})")
    options = parser.parse_args()
    benchmark = BENCHMARKS[options.benchmark]

    with metrale.open("cuda") as gpu:
        # the calls to the driver here need a current context.
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu.ordinal))))
        facts: dict[str, Any] = {
            "gpu": gpu.name,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nvrtc": _version("nvidia-cuda-nvrtc"),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": options.commit,
            **benchmark.run(gpu),
        }
    head = "{gpu}, driver {driver}, Python {python}, {date}, commit {commit}.".format(**facts)
    text = f"{head} {benchmark.table(facts)}"
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(text + "\n")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _output(*command: str) -> str:
    """The first line that a command prints; "unknown" if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
