# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the documents say is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]


def block(language):
    return re.search(rf"```{language}\n(.*?)```", (TREE / "README.md").read_text(), re.DOTALL)[1]


def test_the_example_of_the_readme_prints_what_the_readme_says(tmp_path):
    (tmp_path / "scale.cu").write_text(block("cuda"))
    (tmp_path / "example.py").write_text(block("python"))
    environment = {**os.environ, "METRALE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stderr, done.stdout.replace(str(tmp_path), "/home/me")) == ("", block("text"))


def test_every_environment_variable_is_documented():
    code = [path.read_text() for suffix in ("py", "pyx") for path in (TREE / "metrale").rglob(f"*.{suffix}")]
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', "".join(code)))
    documented = set(re.findall(r"`([A-Z0-9_]+)`", (TREE / "docs" / "environment.md").read_text()))
    assert read <= documented
    assert {name for name in documented if name.startswith("METRALE_")} <= read
