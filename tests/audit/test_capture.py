# SPDX-License-Identifier: MIT OR Apache-2.0
"""The capture file: what is written is read again, and what is no capture is refused."""

import json

import pytest
from captures import capture, entry, many

from metrale.audit.capture import VERSION, Capture
from metrale.errors import FormatError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.json"


def written(path, facts):
    path.write_text(json.dumps(facts))
    return path


@pytest.fixture
def facts(path):
    """A capture's file as plain values."""
    capture([entry(1, 100, tag="a", freed_seq=2), entry(3, 200)]).write(path)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "made", [many(500), capture(), capture([]), capture([entry(1, 1)], [entry(1, 2, kind="pinned")])]
)
def test_what_is_written_is_read_again(made, path):
    made.write(path)
    assert Capture.read(path) == made


def test_an_address_a_tag_and_a_path_of_any_kind_come_back(path):
    odd = entry(1, 2**62, tag="Gewichte \U0001f600 </script>", file="/home/\udcff/a.py", ptr=2**64 - 1)
    capture([odd]).write(path)
    assert Capture.read(path).backends[0].entries == [odd]


def test_a_text_is_written_once(path):
    capture([entry(seq, 8, tag="weights") for seq in range(1, 100)]).write(path)
    assert path.read_text().count("weights") == 1


def test_writing_replaces_the_file_and_leaves_no_other(path):
    path.write_text("old")
    capture([]).write(path)
    assert [found.name for found in path.parent.iterdir()] == ["c.json"]


def test_writing_that_fails_leaves_what_was_there(path, monkeypatch):
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        capture([]).write(path)
    assert [(found.name, found.read_text()) for found in path.parent.iterdir()] == [("c.json", "old")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got nothing, needed: a capture; the process still runs, or ended before it could write it"),
        (b"[1, 2]", "format: got [1, 2], needed"),
        (b'{"format": "other"}', "needed: a capture, with the format 'metrale-audit'"),
        (b"\x7fELF\xff", "no JSON, or not all of it"),
        (b"[" * 100_000, "no JSON, or not all of it"),
    ],
)
def test_a_file_that_is_no_capture_is_refused(path, content, words):
    path.write_bytes(content)
    with pytest.raises(FormatError) as refusal:
        Capture.read(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert words in str(refusal.value)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused(path, share):
    many(50).write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(FormatError, match="no JSON, or not all of it"):
        Capture.read(path)


def test_a_newer_version_is_refused_and_named(path, facts):
    with pytest.raises(FormatError, match=f"version: got {VERSION + 1}, needed: 1..{VERSION}; a newer metrale"):
        Capture.read(written(path, facts | {"version": VERSION + 1}))


def test_a_file_that_is_missing_is_an_error_of_the_system(path):
    with pytest.raises(FileNotFoundError):
        Capture.read(path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("nbytes", [1]),
        ("nbytes", ["1", "2"]),
        ("nbytes", None),
        ("tag", [0, 99]),
        ("tag", [0, -2]),
        ("kind", [-1, -1]),
        ("leaked", [True, False]),
    ],
)
def test_records_that_do_not_fit_are_refused(path, facts, column, values):
    facts["backends"][0]["records"][column] = values
    with pytest.raises(FormatError, match="a damaged capture"):
        Capture.read(written(path, facts))


@pytest.mark.parametrize("part", ["process", "strings", "backends"])
def test_a_part_that_is_missing_is_named(path, facts, part):
    del facts[part]
    with pytest.raises(FormatError, match=f"a damaged capture: KeyError '{part}'"):
        Capture.read(written(path, facts))


def test_a_fact_of_another_type_is_refused(path, facts):
    facts["backends"][0]["peak_bytes"] = "many"
    with pytest.raises(FormatError, match="peak_bytes: 'many'"):
        Capture.read(written(path, facts))
