# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale audit``: record a program's GPU memory, report on it, compare two records."""

import argparse
import json
import sys
from pathlib import Path

from metrale.audit import diff, tables, text
from metrale.audit.capture import Capture
from metrale.cli.json_text import print_json

__all__ = ["audit"]


def audit(options: argparse.Namespace) -> int:
    """Run the action of the command line; returns the exit status."""
    if options.action == "run":
        from metrale.audit.run import run

        return run(
            options.target,
            options.arguments,
            module=options.module,
            output=options.output,
            fail_on_leak=options.fail_on_leak,
        )
    if options.action == "diff":
        before, after = Capture.read(options.before), Capture.read(options.after)
        if options.json:
            print_json(diff.facts(before, after))
        else:
            text.print_tables(diff.report(before, after, options.rows))
        return 0
    return _report(options)


def _report(options: argparse.Namespace) -> int:
    capture = Capture.read(options.capture)
    if options.html:
        from metrale.audit.html import write_page

        write_page(capture, options.html)
    if options.png:
        from metrale.audit.picture import draw

        draw(capture, options.png)
    if options.perfetto:
        from metrale.audit.perfetto import trace

        Path(options.perfetto).write_text(json.dumps(trace(capture)))
    written = [path for path in (options.html, options.png, options.perfetto) if path]
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print_json(tables.facts(capture))
    elif not written:
        text.print_tables(text.report(capture, options.rows))
    return 0
