# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command ``metrale``."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metrale.errors import MetraleError

if TYPE_CHECKING:
    from metrale.cli.layer import Way

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 for a result out of bounds, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone (`metrale demo | head`): nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MetraleError, OSError, MemoryError) as error:
        print(f"metrale {options.command}: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    # Each command imports what it needs: `metrale info` must work where a part of the package does not.
    if options.command == "info":
        from metrale.cli.info import info

        return info(as_json=options.json)
    if options.command == "kernels":
        from metrale.cli.kernels import build

        return build(options.arch, options.modules)
    if options.command == "audit":
        from metrale.cli.audit import audit

        return audit(options)
    if options.command == "demo":
        from metrale.cli.demo import demo

        return demo(options.model, options.layer, options.tokens, options.seed, _way(options), options.json)
    if options.command == "plan":
        from metrale.cli.plan import plan

        return plan(
            options.model,
            options.gpu_memory,
            options.context,
            options.seqs,
            options.bandwidth,
            as_json=options.json,
        )
    from metrale.cli.verify import verify

    return verify(options.model, options.layer, options.tokens, options.seed, _way(options), options.json)


def _way(options: argparse.Namespace) -> "Way":
    from metrale.cli.layer import Way

    return Way(options.batch, options.slots, options.graph)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metrale", description="CUDA kernel launches and GPU memory, audited.")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="devices, driver, versions, backends, cache")
    info.add_argument("--json", action="store_true")

    demo = commands.add_parser("demo", help="tokens through a MoE layer and its engram, beside the float64 reference")
    demo.add_argument("model", nargs="?", metavar="MODEL.gguf", help="default: a small layer of random weights")
    verify = commands.add_parser("verify", help="every stage of a layer against float64; exit 1 if one is off")
    verify.add_argument("model", metavar="MODEL.gguf")
    for command in (demo, verify):
        command.add_argument("--layer", type=_count, default=0, metavar="N")
        command.add_argument("--tokens", type=_positive, default=8, metavar="N")
        command.add_argument("--seed", type=_count, default=0, metavar="S", help="of the tokens (default 0)")
        command.add_argument("--batch", type=_positive, default=1, metavar="N", help="tokens at a time (default 1)")
        command.add_argument("--slots", type=_positive, metavar="N", help="experts in device memory (default: all)")
        command.add_argument("--graph", action="store_true", help="capture the step, and launch it again for each")
        command.add_argument("--json", action="store_true")

    plan = commands.add_parser("plan", help="what a model takes of a GPU's memory, and the bytes of a token")
    plan.add_argument("model", metavar="MODEL.gguf", help="any part of a split file; its header is read, no more")
    plan.add_argument("--gpu-memory", type=_amount, metavar="GIB", help="say what fits in so much")
    plan.add_argument("--context", type=_positive, default=4096, metavar="N", help="tokens a sequence (default 4096)")
    plan.add_argument("--seqs", type=_positive, default=1, metavar="N", help="sequences at a time (default 1)")
    plan.add_argument("--bandwidth", type=_amount, metavar="TB/s", help="default 4.24, measured for a copy on an H200")
    plan.add_argument("--json", action="store_true")

    kernels = commands.add_parser("kernels", help="compile kernels ahead of time")
    actions = kernels.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="compile modules into the cache; needs no GPU")
    build.add_argument("--arch", action="append", required=True, metavar="sm_90a", help="may be given several times")
    build.add_argument("modules", nargs="*", metavar="MODULE", help="default: all")

    audit = commands.add_parser("audit", help="record a program's GPU memory, report on it, compare two records")
    _audit_actions(audit.add_subparsers(dest="action", required=True))
    return parser


def _audit_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usage = "%(prog)s [-h] [-o FILE] [--fail-on-leak] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    run = actions.add_parser("run", usage=usage, help="run a program; say what it leaked, keep a capture")
    run.add_argument("-o", dest="output", metavar="FILE", help="the capture (default: metrale-audit.PID.json)")
    run.add_argument("--fail-on-leak", action="store_true", help="exit 1 if something leaked and the program exits 0")
    run.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    run.add_argument("target", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the program's own")

    report = actions.add_parser("report", help="tables of a capture, or other forms of it")
    report.add_argument("capture", metavar="FILE")
    report.add_argument("--html", metavar="OUT", help="a page to zoom and search in, in one file")
    report.add_argument("--png", metavar="OUT", help="a picture of live bytes by tag; needs matplotlib")
    report.add_argument("--perfetto", metavar="OUT", help="a trace for ui.perfetto.dev")

    diff = actions.add_parser("diff", help="what grew, shrank, came and went between two captures")
    diff.add_argument("before", metavar="BEFORE")
    diff.add_argument("after", metavar="AFTER")
    for action in (report, diff):
        action.add_argument("--json", action="store_true", help="the tables as JSON")
        action.add_argument("--rows", type=_positive, default=20, metavar="N", help="a table (default 20)")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 1 or more")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: more than 0")
    return value
