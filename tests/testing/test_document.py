# SPDX-License-Identifier: MIT OR Apache-2.0
"""What docs/testing.md shows is what happens."""

import re
from pathlib import Path

pytest_plugins = ["pytester"]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
CONFTEST, EXAMPLE = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
SHOWN = re.search(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)[1]


def test_the_example_passes(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(EXAMPLE)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=3)


def test_the_example_fails_where_the_class_leaks(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(EXAMPLE.replace("gpu.buffer(1024", "gpu.alloc(1024").replace("self.keys.free()", "pass"))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert "failed" in done.parseoutcomes()


def test_a_leak_is_shown_as_the_document_says(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_it="""
        def test_leaky(gpu, leak_check):
            gpu.alloc(4096, "cache")
            gpu.create_stream()
        """
    )
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.stdout.fnmatch_lines([re.sub(r"host.*:|/home/me/.*", "*", line) for line in SHOWN.splitlines()])
