# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/kernel_report.py: what ptxas says, and what is worse than before."""

import importlib.util
from pathlib import Path

import pytest

LOG = """\
ptxas info    : 44 bytes gmem, 88 bytes cmem[4]
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 102 registers, used 1 barriers, 1024 bytes smem, 384 bytes cmem[0]
ptxas info    : Compile time = 70.369 ms
ptxas info    : Compiling entry function 'spilling' for 'sm_80'
ptxas info    : Function properties for spilling
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for called
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, 376 bytes cmem[0]
"""
PLAIN = {"registers": 102, "shared": 1024, "stack": 0, "spill": 0}
SPILLING = {"registers": 24, "shared": 0, "stack": 24, "spill": 32}


@pytest.fixture(scope="module")
def report():
    path = Path(__file__).resolve().parents[2] / "tools" / "kernel_report.py"
    spec = importlib.util.spec_from_file_location("kernel_report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(report, got, known, same_compiler=True):
    table, before = ({"m.k": {"sm_80": resources}} if resources else {} for resources in (got, known))
    return report.differences(table, before, same_compiler)


def test_a_log_is_read_and_a_called_function_counts_for_its_kernel(report):
    assert report.parse_log(LOG) == {"plain": PLAIN, "spilling": SPILLING}


@pytest.mark.parametrize("log", ["", "nothing of the kind", LOG.replace("Used", "Needs")])
def test_a_log_of_another_form_is_an_error(report, log):
    with pytest.raises(ValueError, match="not understood"):
        report.parse_log(log)


@pytest.mark.parametrize("field", ["stack", "spill"])
def test_more_stack_or_spill_is_an_error_with_any_compiler(report, field):
    for same_compiler in (True, False):
        errors, _ = compare(report, {**PLAIN, field: 4}, PLAIN, same_compiler)
        assert errors == [f"m.k sm_80: {field} 4, was 0"]


def test_less_of_it_is_not(report):
    assert compare(report, PLAIN, {**PLAIN, "spill": 4}) == ([], ["m.k sm_80: spill 0, was 4"])


def test_registers_are_compared_for_the_same_compiler_only(report):
    assert compare(report, {**PLAIN, "registers": 103}, PLAIN) == ([], ["m.k sm_80: registers 103, was 102"])
    assert compare(report, {**PLAIN, "registers": 103}, PLAIN, same_compiler=False) == ([], [])


def test_a_kernel_on_one_side_only_is_an_error(report):
    assert compare(report, PLAIN, None)[0] == ["m.k sm_80: not in the table"]
    assert compare(report, None, PLAIN)[0] == ["m.k: in the table, but not compiled"]
