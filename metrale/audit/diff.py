# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two captures of a program, compared: which tags and call sites hold more, less, are new or gone."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from metrale.audit.capture import BackendCapture, Capture
from metrale.audit.tables import Group, count_words, groups, leaks
from metrale.audit.text import Table, backend_line, more

__all__ = ["Change", "changes", "facts", "report"]

COMPARED = {"tag": "By tag", "site": "By call site"}


@dataclass(frozen=True)
class Change:
    """A name in both captures; "grew" and "shrank" go by the most bytes that lived at once, then by bytes and count."""

    name: str
    change: str
    before: Group
    after: Group

    @property
    def difference(self) -> int:
        """Bytes of peak."""
        return self.after.peak - self.before.peak


def changes(before: BackendCapture | None, after: BackendCapture | None, by: str) -> list[Change]:
    """What differs, the largest difference of peaks first."""
    sides: list[dict[str, Group]] = [
        {group.name: group for group in groups(side, by)} if side else {} for side in (before, after)
    ]
    found = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = (side.get(name) for side in sides)
        if a != b:
            word = "new" if a is None else "gone" if b is None else _word(a, b)
            found.append(Change(name, word, a or Group(name), b or Group(name)))
    return sorted(found, key=lambda c: (-abs(c.difference), -abs(c.after.nbytes - c.before.nbytes), c.name))


def _word(a: Group, b: Group) -> str:
    sizes = [(g.peak, g.nbytes, g.count, g.leaked_bytes, g.leaked, g.at_peak) for g in (a, b)]
    return "grew" if sizes[1] > sizes[0] else "shrank"


def report(before: Capture, after: Capture, rows: int) -> Iterable[str | Table]:
    """A line or table after another. Backends are compared in the order in which they were opened."""
    for a, b in zip_longest(before.backends, after.backends):
        first = a or b
        yield f"backend   {backend_line(first)}{'' if a and b else ', new' if b else ', gone'}"
        if a and b and (a.kind, a.name) != (b.kind, b.name):
            yield f"now       {backend_line(b)}"
        peaks = [side.peak_bytes if side else 0 for side in (a, b)]
        yield f"peak      {peaks[0]:,} -> {peaks[1]:,} bytes ({peaks[1] - peaks[0]:+,})"
        lost = [(count_words(leaks(side)) if side else "") or "nothing" for side in (a, b)]
        yield f"leaked    {lost[0]} -> {lost[1]}"
        for by, title in COMPARED.items():
            found = changes(a, b, by)
            columns = ("difference", "peak before", "after", "count before", "after", "leaked before", "after")
            table = Table(f"{title}, peak bytes", ("change", *columns, "name"))
            for c in found[:rows]:
                pairs = (
                    (c.before.peak, c.after.peak),
                    (c.before.count, c.after.count),
                    (c.before.leaked, c.after.leaked),
                )
                numbers = (f"{n:,}" for pair in pairs for n in pair)
                table.rows.append((c.change, f"{c.difference:+,}", *numbers, c.name))
            table.note = more(len(found), rows)
            if found:
                yield table
            else:
                yield f"{title.lower()}: no difference"
        yield ""


def facts(before: Capture, after: Capture) -> dict[str, Any]:
    """The same as plain values, for JSON."""
    backends = []
    for a, b in zip_longest(before.backends, after.backends):
        sides = {
            side: {"name": c.name, "kind": c.kind, "peak_bytes": c.peak_bytes, "leaks": len(leaks(c))} if c else None
            for side, c in (("before", a), ("after", b))
        }
        tables = {
            f"by_{by}": [asdict(change) | {"difference": change.difference} for change in changes(a, b, by)]
            for by in COMPARED
        }
        backends.append(sides | tables)
    return {"backends": backends}
