# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/bench.py launch: whose time is whose, what is over the C driver call, and how it is shown."""

import ctypes
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

import metrale

FLOOR, AGAIN = "C driver call", "C driver call, again"
BUILDER, PREPARED = "metrale KernelLaunch", "metrale PreparedLaunch"
KINDS = {ctypes.c_uint64: ("ptr", "ptr?", "u64"), ctypes.c_uint32: ("u32",), ctypes.c_float: ("f32",)}


@pytest.fixture(scope="module")
def launch(tool):
    return tool("benchmarks.launch")


@pytest.fixture(scope="module")
def report(tool):
    return tool("benchmarks.launch_report")


@pytest.fixture(scope="module")
def gpu():
    with metrale.open("host") as gpu:
        gpu.add_module(Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "noop.cu")
        yield gpu


def group(launch, arguments=17, kernel="noop17", **ways):
    return launch.Group(kernel, arguments, {FLOOR: lambda n: 100.0, **ways})


def a_row(launch, over, way=PREPARED, arguments=17, kernel=None):
    times = [1000.0 + over, 1000.0 + over], [1000.0, 1000.0]
    return launch.row(launch.Group(kernel or f"noop{arguments}", arguments, {}), way, *times)


def facts(rows, not_measured=()):
    return {
        "benchmark": "launch", "gpu": "GPU", "driver": "1", "python": "3", "date": "2000-01-01", "commit": "abc",
        "cpu": "CPU", "packages": {"torch": "2", "triton": None}, "rounds": 2, "batch": 3,
        "rows": rows, "not_measured": list(not_measured),
    }  # fmt: skip


# statistics


def test_what_is_over_the_floor_is_the_median_of_the_differences_in_a_round(launch):
    row = launch.row(group(launch), PREPARED, [10.0, 20.0, 90.0], [9.0, 5.0, 80.0])
    assert (row["ns"], row["over_c_ns"], row["medians_over_c_ns"]) == (20, 10, 11)


def test_the_deciles_are_those_of_the_way(launch):
    row = launch.row(group(launch), PREPARED, [float(i) for i in range(101)], [0.0] * 101)
    assert (row["p10_ns"], row["p90_ns"]) == (10, 90)


@pytest.mark.parametrize(
    ("way", "arguments", "over", "met"),
    [
        (BUILDER, 17, 800, True), (BUILDER, 17, 800.5, False), (BUILDER, 5, 800.5, None),
        (PREPARED, 0, 150, True), (PREPARED, 0, 150.5, False),
        ("metrale.ops", 4, 400, True), ("metrale.ops", 4, 400.5, False),
        ("metrale from Cython", 5, 50, True), ("metrale from Cython, nogil", 17, 50.5, False),
        ("cuda.core", 17, 0, None),
    ],
)  # fmt: skip
def test_a_target_is_met_up_to_its_value(launch, way, arguments, over, met):
    assert a_row(launch, over, way, arguments).get("met") is met


# measuring


def test_times_are_paired_by_round(launch):
    clock = iter(range(10**6))
    drifting = {
        way: lambda n, extra=extra: (next(clock) // 4) * 1000.0 + extra for way, extra in ((FLOOR, 0), ("a", 7))
    }
    rows = launch.measure([launch.Group("noop0", 0, drifting)], lambda: None, {}, rounds=10)
    assert [(row["way"], row["over_c_ns"]) for row in rows] == [(FLOOR, 0), ("a", 7)]


def test_rounds_to_warm_up_and_untimed_batches_do_not_count(launch):
    turns = iter([1e9] * (2 * launch.WARM_UP) + [1e9, 5.0, 1e9, 5.0])
    rows = launch.measure([group(launch, a=lambda n: next(turns))], lambda: None, {}, rounds=2)
    assert rows[1]["ns"] == 5


def test_every_batch_finds_the_stream_idle_and_has_all_its_launches(launch):
    seen = []
    ways = {way: lambda n: seen.append(n) or 1.0 for way in (FLOOR, "a")}
    launch.measure([launch.Group("noop0", 0, ways)], lambda: seen.append("idle"), {}, rounds=2)
    assert seen == ["idle", launch.BATCH] * 2 * 2 * (launch.WARM_UP + 2)


def test_each_round_has_each_way_once_in_an_order_of_its_own(launch):
    turns = []
    ways = {way: lambda n, way=way: turns.append(way) or 1.0 for way in (FLOOR, "a", "b")}
    launch.measure([launch.Group("noop0", 0, ways)], lambda: None, {}, rounds=10)
    rounds = [tuple(turns[i : i + 6 : 2]) for i in range(0, len(turns), 6)]
    assert {frozenset(order) for order in rounds} == {frozenset(ways)}
    assert len(set(rounds)) > 3


def test_a_way_that_fails_is_left_out_with_its_reason(launch):
    def broken(n):
        raise OSError("gone\nmore")

    failures = {}
    rows = launch.measure([group(launch, a=broken, b=lambda n: 1.0)], lambda: None, failures, rounds=2)
    assert [row["way"] for row in rows] == [FLOOR, "b"]
    assert failures == {("a", "noop17"): "OSError: gone"}


def test_without_a_floor_there_is_nothing_to_report(launch):
    with pytest.raises(ZeroDivisionError):
        launch.measure([launch.Group("noop0", 0, {FLOOR: lambda n: 1 / 0})], lambda: None, {}, rounds=2)


# ways


@pytest.mark.parametrize("arguments", [0, 5, 17])
def test_metrales_ways_launch_on_the_host_which_has_no_graphs(launch, gpu, arguments):
    failures = {}
    makers = {way: make for way, make in launch.METRALE.items() if "graph" not in way}
    with ExitStack() as cleanup:
        pointer = int(cleanup.enter_context(gpu.buffer(256)).ptr)
        noop = launch.Noop(gpu, gpu.kernel("noop", f"noop{arguments}"), arguments, pointer)
        ways = launch.made(noop, makers, cleanup, failures)
    assert list(failures.values()) == ([] if arguments else ["ValueError: there is no argument to set"])
    assert len(ways) + len(failures) == len(makers)


def test_a_peer_that_is_not_there_is_said_to_be_missing(launch, gpu):
    def absent(noop, cleanup):
        import no_such_package  # noqa: F401

    failures = {}
    noop = launch.Noop(gpu, gpu.kernel("noop", "noop0"), 0, 0)
    assert launch.made(noop, {"peer": absent}, ExitStack(), failures) == {}
    assert failures == {("peer", "noop0"): "ModuleNotFoundError: No module named 'no_such_package'"}


@pytest.mark.parametrize("arguments", [0, 5, 17])
def test_the_c_loop_has_an_argument_of_each_parameters_kind(launch, gpu, arguments):
    noop = launch.Noop(gpu, gpu.kernel("noop", f"noop{arguments}"), arguments, 0)
    assert_kinds(noop.kernel, noop.c_values())


def test_a_launcher_and_its_c_loop_launch_the_same_kernel(launch, gpu):
    with ExitStack() as cleanup:
        for make in launch.OPS:
            op = make(gpu, cleanup)
            assert_kinds(op.kernel, op.values)
            op.way(1)


def assert_kinds(kernel, values):
    assert len(values) == len(kernel.params)
    assert all(kind in KINDS[type(value)] for value, (_, kind) in zip(values, kernel.params, strict=True))


def test_the_c_loop_calls_the_driver_with_the_arguments(tool):
    calls = []
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3])

    def driver(*call):
        values = ctypes.cast(call[9], ctypes.POINTER(ctypes.POINTER(ctypes.c_uint32)))
        calls.append((*call[:9], values[0][0], values[1][0]))
        return 0

    loop = tool("benchmarks.native").c_loop(prototype(driver), 11, 64, 12, [ctypes.c_uint32(7), ctypes.c_uint32(8)])
    assert loop(3) > 0
    assert calls == [(11, 1, 1, 1, 64, 1, 1, 0, 12, 7, 8)] * 3


def test_a_launch_that_the_driver_refuses_is_an_error(tool):
    refusing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 700)
    with pytest.raises(RuntimeError, match="cuLaunchKernel: driver error 700"):
        tool("benchmarks.native").c_loop(refusing, 0, 32, 0, [])(1)


# table and chart


def test_a_line_has_the_time_what_is_over_the_floor_and_the_target(launch, report):
    rows = [a_row(launch, 149.6), a_row(launch, 260, arguments=0)]
    assert f"| {PREPARED} | 1.26 (+0.26, +0.26) | 1.15 (+0.15, +0.15) | +0.15: not met at 0 |" in report.table(
        facts(rows)
    )


def test_a_way_that_some_kernels_lack_keeps_its_place(launch, report):
    rows = [a_row(launch, 0, "b", 0), a_row(launch, 0, "a", 17), a_row(launch, 0, "b", 17)]
    assert "| a | - | 1.00 (+0.00, +0.00) |  |\n| b | 1.00 " in report.table(facts(rows))


def test_a_launcher_stands_beside_the_c_call_for_its_kernel(launch, report):
    rows = [a_row(launch, over, way, 7, "gemv") for way, over in ((FLOOR, 0), (AGAIN, 10), ("metrale.ops", 300))]
    line = "| `gemv`, 7 arguments | 1.00 | 1.01 (+0.01, +0.01) | 1.30 (+0.30, +0.30) |"
    assert line in report.table(facts(rows))


def test_what_is_missing_is_listed_by_reason(launch, report):
    missing = [{"way": "peer", "kernel": f"noop{n}", "reason": "E: none" if n else "E: other"} for n in (0, 5, 17)]
    text = report.table(facts([a_row(launch, 0)], missing))
    assert text.endswith("\nNot measured: peer (noop0): E: other\n\nNot measured: peer (noop5, noop17): E: none")


def test_a_bar_is_what_is_over_the_floor_in_microseconds(launch, report):
    rows = [a_row(launch, over, way, n) for n in (0, 17) for way, over in ((FLOOR, 0), (PREPARED, 100 + n))]
    rows += [a_row(launch, over, way, 7, "gemv") for way, over in ((FLOOR, 0), (AGAIN, 10), ("metrale.ops", 300))]
    assert report.bars(facts(rows)) == {PREPARED: {0: 0.1, 17: 0.117}, "ops.gemv": {7: 0.3}}


def test_a_chart_of_earlier_results_needs_no_gpu(launch, tool, tmp_path, capsys):
    earlier, chart = tmp_path / "earlier.json", tmp_path / "chart.svg"
    earlier.write_text(json.dumps(facts([a_row(launch, 0, FLOOR), a_row(launch, 123.4), a_row(launch, 5, "peer")])))
    tool("bench").main(["launch", "--from", str(earlier), "--chart", str(chart)])
    assert f"| {PREPARED} | 1.12 (+0.12, +0.12) |" in capsys.readouterr().out
    drawn = chart.read_text()
    assert all(f">{text}<" in drawn for text in (PREPARED, "peer", "+0.12", "17 arguments"))
    assert f">{FLOOR}<" not in drawn


def test_the_same_results_give_the_same_chart(launch, report, tmp_path):
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    report.chart(facts([a_row(launch, 5)]), first)
    report.chart(facts([a_row(launch, 5)]), second)
    assert first.read_bytes() == second.read_bytes()


def test_results_of_another_benchmark_are_refused(tool, tmp_path, capsys):
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(facts([]) | {"benchmark": "kernels"}))
    with pytest.raises(SystemExit):
        tool("bench").main(["launch", "--from", str(earlier)])
    assert "--from: got results of kernels, allowed: of launch" in capsys.readouterr().err


def test_a_benchmark_without_a_chart_refuses_it(tool, capsys):
    with pytest.raises(SystemExit):
        tool("bench").main(["startup", "--chart", "x.svg"])
    assert "--chart: got x.svg, allowed: with gdn and launch only" in capsys.readouterr().err
