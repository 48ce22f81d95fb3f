# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale plan` as users run it."""

import json
import re
import time
from pathlib import Path

import pytest
from model_files import write_model
from processes import python

from metrale.cli import main

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-v41.gguf"


def run(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def numbers(value):
    """Every integer in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {number for item in value for number in numbers(item)}
    return {value} if isinstance(value, int) and not isinstance(value, bool) else set()


def rows(table, header):
    """The rows under the line that starts with `header`, up to an empty line, as lists of cells."""
    lines = table.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"{header}\s\s", line)) + 1
    block = lines[start : lines.index("", start)]
    return [re.split(r"\s{2,}", line) for line in block]


def test_the_figures_of_the_table_are_those_of_json(flash, capsys):
    options = [flash, "--gpu-memory", "141", "--seqs", "4", "--context", "1000"]
    table, facts = run(capsys, *options), json.loads(run(capsys, *options, "--json"))
    printed = {int(text.replace(",", "")) for text in re.findall(r"(?<=  )[\d,]{5,}(?=\s)", table)}
    assert len(printed) > 40
    assert printed <= numbers(facts)


@pytest.mark.parametrize(("header", "key"), [("kind", "kinds"), ("type", "types")])
def test_each_kind_and_type_has_its_row(capsys, header, key):
    table, facts = run(capsys, TINY), json.loads(run(capsys, TINY, "--json"))
    printed = {name: (int(tensors), int(size.replace(",", ""))) for name, tensors, size, *_ in rows(table, header)}
    assert printed == {name: (a["tensors"], a["nbytes"]) for name, a in facts[key].items()}


def test_a_row_says_what_may_be_streamed(capsys):
    assert [row[0] for row in rows(run(capsys, TINY), "kind") if row[-1] == "may be streamed"] == [
        "routed experts",
        "engram tables",
    ]


def test_what_fits_has_a_row_for_each_number_of_engram_tables(flash, capsys):
    options = [flash, "--gpu-memory", "141"]
    table, facts = run(capsys, *options), json.loads(run(capsys, *options, "--json"))
    printed = [row[2] for row in rows(table, "engram tables of layers")]
    assert printed == [f"{fit['slots']:,}" for fit in facts["fits"]]


def test_the_default_bandwidth_says_where_it_comes_from_and_another_does_not(capsys):
    assert "at 4.24 TB/s, as measured for a copy on an H200\n" in run(capsys, TINY)
    assert "at 2 TB/s\n" in run(capsys, TINY, "--bandwidth", "2")


def test_any_part_of_a_split_file_gives_the_same_plan(flash, capsys):
    plans = [json.loads(run(capsys, flash.with_name(f"deepseek41-0000{n}-of-00006.gguf"), "--json")) for n in (1, 4)]
    assert [plan.pop("path") for plan in plans] != plans
    assert plans[0] == plans[1]


def test_a_split_file_of_261_gigabytes_is_planned_in_a_second_with_the_start_of_python(flash):
    assert sum(path.stat().st_size for path in flash.parent.iterdir()) > 250e9
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("import sys; from metrale.cli import main; sys.exit(main(sys.argv[1:]))", "plan", flash)
        times.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr) == (0, "")
    assert min(times) < 1


def truncated_header(folder):
    path = folder / "cut.gguf"
    path.write_bytes(TINY.read_bytes()[:700])
    return path


def no_model(folder):
    path = folder / "text.gguf"
    path.write_text("a model, but for its bytes")
    return path


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda folder: folder / "missing.gguf", r"No such file or directory: .*missing\.gguf"),
        (no_model, r"text\.gguf: magic: got b'a mo', needed: b'GGUF'"),
        (truncated_header, r"cut\.gguf: .*got a file that ends at byte 700 \(truncated\?\), needed: "),
    ],
)
def test_a_file_that_is_no_model_is_one_line_on_stderr_and_exit_2(tmp_path, capsys, damaged, message):
    assert main(["plan", str(damaged(tmp_path))]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"metrale plan: .*{message}.*\n", captured.err)


def test_a_part_that_is_missing_is_named(tmp_path, flash, capsys):
    (tmp_path / flash.name).symlink_to(flash)
    assert main(["plan", str(tmp_path / flash.name)]) == 2
    assert "deepseek41-00002-of-00006.gguf: part: got no such file" in capsys.readouterr().err


def test_too_little_memory_is_refused_with_what_is_missing(flash, capsys):
    least = json.loads(run(capsys, flash, "--json"))["least_bytes"]
    assert main(["plan", str(flash), "--gpu-memory", "1"]) == 2
    assert f"{least - (1 << 30):,} are missing" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--gpu-memory", "--bandwidth"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "much"])
def test_an_amount_that_is_none_shows_the_usage(option, value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(TINY), f"{option}={value}"])
    assert stop.value.code == 2
    assert option in capsys.readouterr().err


def test_the_example_of_the_document_prints_what_the_document_says(monkeypatch, capsys):
    tree = TINY.parents[2]
    text = (tree / "docs" / "plan.md").read_text()
    command, output = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("sh", "text"))
    monkeypatch.chdir(tree)
    assert run(capsys, *command.split()[2:]) == output


def test_a_file_without_tensors_has_a_plan(tmp_path, capsys):
    assert "0 tensors, 0 bytes" in run(capsys, write_model(tmp_path, "llama", {}, {}))
