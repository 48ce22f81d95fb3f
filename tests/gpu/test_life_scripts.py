# SPDX-License-Identifier: MIT OR Apache-2.0
"""The scripts of life/: each is a program of its own that ends as it says, without another word on stderr.

``METRALE_LIFE_REPEATS`` (3) is how often each is run. A script that says ``# repeats: inside`` gets the number and
loops by itself, a large number in shares of 10 or more side by side; the others, which show how a process ends, are
run that many times with the number of the run. What one prints on stderr it says as a pattern, ``# stderr: ...``.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPEATS = int(os.environ.get("METRALE_LIFE_REPEATS", "3"))
FOLDER = Path(__file__).with_name("life")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "things")
PROCESSES = min(os.cpu_count(), max(1, REPEATS // 10))
SHARES = [-(-REPEATS // PROCESSES)] * PROCESSES
TIMEOUT = 100 + 2 * REPEATS  # seconds for one process; what takes longer hangs


@pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_ends_as_it_says(script, kind, cache_folder):
    path = FOLDER / f"{script}.py"
    said = dict(re.findall(r"^# (repeats|stderr): (.*)$", path.read_text(), re.MULTILINE))
    numbers = SHARES if said.get("repeats") == "inside" else range(REPEATS)

    def run(number):
        command = [sys.executable, "-X", "faulthandler", "-W", "error", path, kind, str(number)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(run, numbers))

    for done in runs:
        assert re.fullmatch(said.get("stderr", ""), done.stderr), done.stderr
        assert (done.returncode, done.stdout) == (0, "")
