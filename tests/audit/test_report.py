# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale audit report`` and ``diff``, run on captures."""

import json
import os
import pty
import subprocess
import sys
from collections import Counter

import pytest
from captures import capture, entry, many

from metrale.cli import main

BEFORE = [
    entry(1, 100, tag="kv", line=1, freed_seq=9),
    entry(2, 40, tag="old", line=2),
    entry(3, 8, tag="same", line=3),
]
AFTER = [
    *(entry(1, 300, tag="kv", line=1, freed_seq=9), entry(2, 5, tag="new", line=4), entry(3, 8, tag="same", line=3)),
    entry(4, 60, kind="event", line=7),
]


@pytest.fixture
def saved(tmp_path):
    """`saved(name, *ledgers)`: the path of a capture."""

    def save(name, *ledgers):
        capture(*ledgers).write(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.fixture
def big(tmp_path):
    many(300).write(tmp_path / "big.json")
    return str(tmp_path / "big.json")


def out(capsys, *arguments):
    assert main(["audit", *arguments]) == 0
    return capsys.readouterr().out


def table(text, title):
    """The rows below a title, split at two blanks or more."""
    lines = text.splitlines()
    rows = lines[lines.index(title) + 1 :]
    return [line.split() for line in rows[: rows.index("") if "" in rows else None]]


def test_tables_are_plain_where_stdout_is_no_terminal(saved, capsys):
    text = out(capsys, "report", saved("a.json", BEFORE))
    assert table(text, "By tag") == [
        ["peak", "at", "peak", "allocated", "count", "leaked", "name"],
        ["100", "100", "100", "1", "0", "kv"],
        ["40", "40", "40", "1", "1", "old"],
        ["8", "8", "8", "1", "1", "same"],
    ]


def test_a_leak_is_a_line_with_its_bytes_tag_and_site(saved, capsys):
    text = out(capsys, "report", saved("a.json", BEFORE))
    assert table(text, "Leaks")[1:] == [
        ["40", "2", "device", "old", "/home/me/train.py:2"],
        ["8", "3", "device", "same", "/home/me/train.py:3"],
    ]


def test_columns_are_aligned(big, capsys):
    text = out(capsys, "report", big)
    lines = text.splitlines()
    biggest = lines[lines.index("Biggest") + 1 :][:21]
    assert len({line.index(word) for line, word in zip(biggest, ["kind"] + ["device"] * 20, strict=True)}) == 1


def test_rows_are_limited_and_the_rest_is_counted(big, capsys):
    text = out(capsys, "report", big, "--rows", "3")
    assert len(table(text, "Biggest")) == 1 + 3 + 1
    assert "... and 297 more" in text


def test_every_leak_is_listed(big, capsys):
    leaked = json.loads(out(capsys, "report", big, "--json"))["backends"][0]["leaks"]
    assert len(leaked) > 3
    assert len(table(out(capsys, "report", big, "--rows", "3"), "Leaks")) == 1 + len(leaked)


def test_a_tag_never_breaks_a_line_or_speaks_to_a_terminal(saved, capsys):
    odd = entry(1, 9, tag="a\nb\x1b[2J", file="/home/\udcff.py", line=3)
    text = out(capsys, "report", saved("a.json", [odd]))
    assert table(text, "Leaks")[1:] == [["9", "1", "device", r"a\nb\x1b[2J", r"/home/\udcff.py:3"]]


def test_a_capture_without_a_backend_says_so(saved, capsys):
    assert "no backend was opened" in out(capsys, "report", saved("a.json"))


def test_json_has_the_figures_of_the_tables(saved, capsys):
    path = saved("a.json", BEFORE)
    facts = json.loads(out(capsys, "report", path, "--json"))["backends"][0]
    rows = table(out(capsys, "report", path), "By tag")[1:]
    assert [[str(g["peak"]), str(g["at_peak"]), str(g["nbytes"])] for g in facts["by_tag"]] == [r[:3] for r in rows]


def test_a_terminal_gets_richs_tables(saved):
    pytest.importorskip("rich")
    path, (main_end, child_end) = saved("a.json", BEFORE), pty.openpty()
    command = [sys.executable, "-P", "-m", "metrale", "audit", "report", path]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    subprocess.run(command, stdout=child_end, check=True, env=env)
    os.close(child_end)
    shown = b""
    try:
        while chunk := os.read(main_end, 65536):
            shown += chunk
    except OSError:  # the end of a terminal
        pass
    os.close(main_end)
    assert "┃" in shown.decode()
    assert "train.py:2" in shown.decode()


def test_a_picture_is_a_png(big, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert out(capsys, "report", big, "--png", str(tmp_path / "p.png")) == ""
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("tag", ["_hidden", "$\\frac{", "a\nb", "\U0001f600"])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_picture_has_any_tag_in_its_legend(saved, tmp_path, tag, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    assert main(["audit", "report", saved("a.json", [entry(1, 9, tag=tag)]), "--png", str(tmp_path / "p.png")]) == 0
    legend = drawn[0].axes[0].get_legend()
    assert f" {tag}".replace("$", r"\$") in [words.get_text() for words in legend.get_texts()]


def test_a_picture_without_matplotlib_says_what_to_install(big, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["audit", "report", big, "--png", str(tmp_path / "p.png")]) == 2
    assert "pip install 'metrale[audit]'" in capsys.readouterr().err


@pytest.fixture
def trace(saved, tmp_path, capsys):
    ledger = [entry(1, 100, tag="kv", freed_seq=3), entry(2, 40, line=2), entry(4, 9, kind="pinned", freed_seq=5)]
    out(capsys, "report", saved("a.json", ledger), "--perfetto", str(tmp_path / "t.json"))
    return json.loads((tmp_path / "t.json").read_text())


def test_a_trace_keeps_the_formats_rules(trace):
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MCbe"
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float))
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_each_slice_of_a_trace_begins_once_and_ends_once_and_not_before(trace):
    key = lambda e: (e["pid"], e["cat"], e["id"], e["name"])  # noqa: E731
    begins = {key(e): e["ts"] for e in trace["traceEvents"] if e["ph"] == "b"}
    ends = {key(e): e["ts"] for e in trace["traceEvents"] if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert Counter(e["ph"] for e in trace["traceEvents"] if e["ph"] in "be") == {"b": 3, "e": 3}
    assert all(begins[k] <= ends[k] for k in begins)


def test_slices_of_two_backends_are_told_apart(saved, tmp_path, capsys):
    out(capsys, "report", saved("a.json", BEFORE, BEFORE), "--perfetto", str(tmp_path / "t.json"))
    begins = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "b"]
    assert len({(e["cat"], e["id"]) for e in begins}) == 2 * len(BEFORE)


def test_a_traces_counter_steps_through_the_live_bytes(trace):
    live = [(e["ts"], e["args"]["bytes"]) for e in trace["traceEvents"] if e["name"] == "live bytes"]
    assert live == [(1, 100), (2, 140), (3, 40)]


@pytest.fixture
def diff(saved, capsys):
    return out(capsys, "diff", saved("a.json", BEFORE), saved("b.json", AFTER))


def test_a_difference_is_a_row_with_what_changed(diff):
    assert [(row[0], row[1], row[-1]) for row in table(diff, "By tag, peak bytes")[1:]] == [
        ("grew", "+200", "kv"),
        ("gone", "-40", "old"),
        ("new", "+5", "new"),
    ]


def test_call_sites_are_compared_too(diff):
    assert [row[-1] for row in table(diff, "By call site, peak bytes")[1:]] == [
        f"/home/me/train.py:{line}" for line in (1, 2, 4)
    ]


def test_peaks_and_leaks_are_compared(diff):
    assert "peak      148 -> 313 bytes (+165)" in diff
    assert "leaked    2 allocations, 48 bytes -> 2 allocations, 13 bytes, 1 event" in diff


def test_what_holds_less_shrank(saved, capsys):
    assert "shrank" in out(capsys, "diff", saved("b.json", AFTER), saved("a.json", BEFORE))


def test_captures_that_agree_differ_in_nothing(saved, capsys):
    path = saved("a.json", BEFORE)
    text = out(capsys, "diff", path, path)
    assert "by tag: no difference" in text
    assert "by call site: no difference" in text


def test_a_backend_that_only_one_has_is_new_or_gone(saved, capsys):
    one, two = saved("one.json", BEFORE), saved("two.json", BEFORE, AFTER)
    assert "GiB, new\npeak      0 -> 313 bytes" in out(capsys, "diff", one, two)
    assert "GiB, gone\npeak      313 -> 0 bytes" in out(capsys, "diff", two, one)


def test_differences_as_json(saved, capsys):
    text = out(capsys, "diff", saved("a.json", BEFORE), saved("b.json", AFTER), "--json")
    first = json.loads(text)["backends"][0]["by_tag"][0]
    assert (first["name"], first["change"], first["difference"], first["after"]["peak"]) == ("kv", "grew", 200, 300)


@pytest.mark.parametrize("action", [["report"], ["diff", "missing.json"]])
def test_a_file_that_is_no_capture_is_a_line_and_exit_2(action, tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert main(["audit", *action, str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("metrale audit: ")
