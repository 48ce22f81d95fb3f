# SPDX-License-Identifier: MIT OR Apache-2.0
"""A capture as one page that needs no network: a timeline to zoom, and a table to search and sort."""

import json
import os
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from metrale.audit.capture import MEMORY, BackendCapture, Capture, Entry
from metrale.audit.packing import pack
from metrale.audit.tables import GROUPINGS, groups, started

__all__ = ["page", "write_page"]

PARTS = ("page.html", "page.css", "page_state.js", "page_chart.js", "page_table.js", "page_start.js")
COLUMNS = (
    *("seq", "freedSeq", "time", "freedTime", "nbytes", "rounded", "ptr"),
    *("kind", "tag", "site", "freedAt", "stream", "leaked", "offset"),
)


def write_page(capture: Capture, path: str | os.PathLike[str]) -> None:
    """Write the page."""
    Path(path).write_text(page(capture), encoding="utf-8")


def page(capture: Capture) -> str:
    """The page's text, with its style, script and data inside."""
    folder = resources.files(__package__)
    text, style, *scripts = ((folder / name).read_text(encoding="utf-8") for name in PARTS)
    # "<" is only ever inside a text, where its escape means the same and cannot end the element.
    data = json.dumps(_data(capture), separators=(",", ":")).replace("<", "\\u003c")
    for mark, content in (("/*style*/", style), ("/*script*/", "".join(scripts)), ("/*data*/", data)):
        before, _, after = text.partition(mark)
        text = before + content + after
    return text


def _data(capture: Capture) -> dict[str, Any]:
    process = asdict(capture.process) | {"started": started(capture.process)}
    process["seconds"] = (capture.process.end_ns - capture.process.start_ns) / 1e9
    del process["start_ns"], process["end_ns"]  # more digits than a number of JavaScript holds
    strings: dict[str, int] = {}
    backends = [_backend(capture, backend, strings) for backend in capture.backends]
    return {"process": process, "strings": list(strings), "backends": backends}


def _backend(capture: Capture, backend: BackendCapture, strings: dict[str, int]) -> dict[str, Any]:
    start = capture.process.start_ns

    def place(text: str | None) -> int:
        return -1 if text is None else strings.setdefault(text, len(strings))

    def row(entry: Entry) -> tuple[Any, ...]:
        return (
            entry.seq,
            entry.freed_seq,
            round((entry.time_ns - start) / 1e3, 3),
            round((entry.freed_ns - start) / 1e3, 3) if entry.freed_seq else -1,
            entry.nbytes,
            entry.rounded,
            f"{entry.ptr:x}",  # an address may be more than a number of JavaScript holds
            place(entry.kind),
            place(entry.tag),
            place(entry.site),
            place(entry.freed_at),
            place(None if entry.stream is None else f"{entry.stream:#x}"),
            int(entry.leaked),
            offsets.get(entry.seq, -1),
        )

    offsets = pack(backend)
    events = backend.timeline
    rows = list(map(row, backend.entries))
    return backend.totals() | {
        "records": dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        if rows
        else {name: [] for name in COLUMNS},
        "live": {
            "seq": [event.seq for event in events],
            "time": [round((event.time_ns - start) / 1e3, 3) for event in events],
            "bytes": [event.live for event in events],
        },
        "groups": {
            name: [[place(g.name), g.count, g.nbytes, g.peak, g.at_peak, g.leaked, g.leaked_bytes] for g in found]
            for name, found in ((name, groups(backend, name)) for name in GROUPINGS)
        },
        "memoryKinds": [place(kind) for kind in MEMORY],
    }
