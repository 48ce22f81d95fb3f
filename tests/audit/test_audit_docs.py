# SPDX-License-Identifier: MIT OR Apache-2.0
"""The example of docs/audit.md does what the document says."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "audit.md"


def test_the_example_of_the_document_leaks_what_the_document_says(tmp_path):
    text = DOCUMENT.read_text()
    program, shown = (re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1] for language in ("python", "console"))
    (tmp_path / "leaky.py").write_text(program)
    command = [sys.executable, "-P", "-m", *shown.splitlines()[0].removeprefix("$ ").split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr[done.stderr.index("metrale audit: ") :].replace(str(tmp_path), "/home/me")
    device = re.compile(r"host \(.*\), [\d.]+ GiB")
    assert device.sub("host", said) == device.sub("host", shown.partition("\n")[2])
