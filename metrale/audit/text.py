# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables for people: aligned text for pipes and files, rich's where stdout is a terminal and rich is installed."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from metrale.audit.capture import BackendCapture, Capture, Entry
from metrale.audit.tables import (
    GROUPINGS,
    biggest,
    count_words,
    groups,
    leaks,
    peak_set,
    started,
)
from metrale.columns import aligned

__all__ = ["Table", "backend_line", "entry_table", "more", "print_tables", "report"]

TITLES = {"kind": "By kind", "tag": "By tag", "site": "By call site", "file": "By file"}


@dataclass
class Table:
    """A title, a heading a column, and rows of cells. Columns are aligned right but for the named ones."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    left: frozenset[str] = frozenset({"kind", "tag", "name", "site", "freed at", "change"})
    note: str = ""


def report(capture: Capture, rows: int) -> Iterable[str | Table]:
    """A line or table after another; at most ``rows`` rows a table, leaks in full."""
    process = capture.process
    yield f"process   {' '.join(process.argv)}"
    seconds = (process.end_ns - process.start_ns) / 1e9
    versions = f"Python {process.python}, metrale {process.metrale}"
    yield f"          pid {process.pid}, {started(process)}, {seconds:.3f} s, {versions}"
    if not capture.backends:
        yield "          no backend was opened"
    for backend in capture.backends:
        yield ""
        yield f"backend   {backend_line(backend)}"
        peak_ms = next((e.time_ns for e in backend.entries if e.seq == backend.peak_seq), process.start_ns)
        when = f"{(peak_ms - process.start_ns) / 1e9:.3f} s after the start"
        yield f"peak      {backend.peak_bytes:,} bytes, at event {backend.peak_seq}, {when}"
        yield f"leaked    {count_words(leaks(backend)) or 'nothing'}"
        if backend.forgotten:
            yield f"missing   {backend.forgotten:,} records that the program's ledger has forgotten"
        for name in GROUPINGS:
            table = Table(TITLES[name], ("peak", "at peak", "allocated", "count", "leaked", "name"))
            found = groups(backend, name)
            for g in found[:rows]:
                sizes = (f"{n:,}" for n in (g.peak, g.at_peak, g.nbytes, g.count, g.leaked))
                table.rows.append((*sizes, g.name))
            table.note = more(len(found), rows)
            yield table
        yield entry_table("Biggest", biggest(backend.memory), rows)
        yield entry_table("Peak set", peak_set(backend), rows)
        yield entry_table("Leaks", leaks(backend), len(backend.entries))


def backend_line(backend: BackendCapture) -> str:
    """Name, kind and memory of the device."""
    return f"{backend.kind}: {backend.name}, {backend.total_bytes / 2**30:.1f} GiB"


def entry_table(title: str, entries: list[Entry], rows: int) -> Table:
    """A row a record: bytes, sequence number, kind, tag, call site."""
    table = Table(title, ("bytes", "seq", "kind", "tag", "site"), note=more(len(entries), rows))
    table.rows = [(f"{e.nbytes:,}", str(e.seq), e.kind, e.label, e.site) for e in entries[:rows]]
    return table


def print_tables(parts: Iterable[str | Table], file: TextIO | None = None) -> None:
    """Print lines and tables; a table without rows is left out."""
    file = file or sys.stdout
    console = _console(file)
    for part in parts:
        if isinstance(part, str):
            print(_shown(part), file=file)
        elif part.rows and console is not None:
            console(part)
        elif part.rows:
            print(_plain(part), file=file)


def _plain(table: Table) -> str:
    cells = [table.columns, *(list(map(_shown, row)) for row in table.rows)]
    left = [i for i, name in enumerate(table.columns) if name in table.left]
    lines = ["", table.title, *aligned(cells, left)]
    return "\n".join(lines + ([table.note] if table.note else []))


def _console(file: TextIO):  # type: ignore[no-untyped-def]  # of rich's types, which may not be there
    """What prints a table with rich, or None."""
    if not file.isatty():
        return None
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=file, highlight=False)

    def show(table: Table) -> None:
        drawn = RichTable(
            title=f"\n{table.title}", title_justify="left", title_style="bold", caption=table.note or None
        )
        for name in table.columns:
            left = name in table.left
            drawn.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
        style = "red" if table.title == "Leaks" else None
        for row in table.rows:
            drawn.add_row(*(Text(_shown(cell)) for cell in row), style=style)
        console.print(drawn)

    return show


def _shown(text: str) -> str:
    """A tag or path may hold anything; a line stays one, and a terminal is told nothing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def more(found: int, rows: int) -> str:
    """What to say below a table of the first ``rows`` of what was found."""
    return f"... and {found - rows:,} more" if found > rows else ""
