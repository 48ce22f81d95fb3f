# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python programs of their own, for what can be seen at a process's start or end only."""

import os
import subprocess
import sys
import tempfile
import textwrap


def python(code, *args, **env):
    """Run `code` in an empty folder; returns the CompletedProcess, whose output is text."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
            env=os.environ | env,
        )


def output_of(code, *args, **env):
    """What a program printed that ends well and says nothing on stderr."""
    done = python(code, *args, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
