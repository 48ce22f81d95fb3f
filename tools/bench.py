#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Benchmarks on the GPU.

    python tools/bench.py arena      experts that are read and copied when they are needed, and those that are there
    python tools/bench.py dense      the dense products beside cuBLAS
    python tools/bench.py engram     the engram's kernels and step, and the hash on the host
    python tools/bench.py gdn        the gated delta rule's verify steps against the bytes they must move, and peers
    python tools/bench.py kernels    every kernel, and the MoE layer for one token, against the bytes they must move
    python tools/bench.py launch     a launch from Python, beside the C driver call and other packages
    python tools/bench.py memory     what the driver says is in use, explained, beside torch and CuPy; the ledger's cost
    python tools/bench.py moe        the MoE's kernels and whole layers, for one token and many, against their targets
    python tools/bench.py startup    import metrale, beside other packages, and a process's first kernel

All print a table; ``--json FILE`` also writes the results, and the table beside them as ``.md``. ``gdn`` and
``launch`` draw a chart too; it and the table are also to be had from earlier results. What it needs is in
``metrale[bench]``, but for the other packages: one that is not there is left out, and said to be.
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
from benchmarks import arena, dense, engram, gdn, kernels, launch, memory, moe, startup

BENCHMARKS: dict[str, Any] = {
    "arena": arena,
    "dense": dense,
    "engram": engram,
    "gdn": gdn,
    "kernels": kernels,
    "launch": launch,
    "memory": memory,
    "moe": moe,
    "startup": startup,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="gdn and launch only: an SVG file")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="earlier", help="show this JSON file, measure nothing"
    )
    commit = _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    parser.add_argument("--commit", default=commit, metavar="HASH", help=f"of what is measured (default: {commit})")
    options = parser.parse_args(arguments)
    benchmark = BENCHMARKS[options.benchmark]
    if options.chart and not hasattr(benchmark, "chart"):
        parser.error(f"--chart: got {options.chart}, allowed: with gdn and launch only")

    if options.earlier:
        facts = json.loads(options.earlier.read_text())
        if facts.get("benchmark") != options.benchmark:
            parser.error(f"--from: got results of {facts.get('benchmark')}, allowed: of {options.benchmark}")
    else:
        facts = {
            "benchmark": options.benchmark,
            "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nvrtc": _version("nvidia-cuda-nvrtc"),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": options.commit,
            **_results(benchmark),
        }
    head = "{gpu}, driver {driver}, Python {python}, {date}, commit {commit}.".format(**facts)
    text = f"{head} {benchmark.table(facts)}"
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(text + "\n")
    if options.chart:
        benchmark.chart(facts, options.chart)
    return 0


def _results(benchmark: Any) -> dict[str, Any]:
    if benchmark is startup:  # its processes open the GPU, each for itself
        return startup.run()
    with metrale.open("cuda") as gpu:
        # the calls to the driver here need a current context.
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu.ordinal))))
        return {"gpu": gpu.name, **benchmark.run(gpu)}


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
