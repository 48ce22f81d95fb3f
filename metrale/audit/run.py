# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program that records itself, and says what became of its memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from metrale.audit.capture import Capture
from metrale.audit.tables import count_words, leaks
from metrale.audit.text import Table, backend_line, entry_table, print_tables
from metrale.errors import FormatError, MetraleError

__all__ = ["run"]

SHOWN = 50
"""Leaks that the summary lists, a backend."""


def run(target: str, arguments: Sequence[str], *, module: bool, output: str | None, fail_on_leak: bool) -> int:
    """Run a script or module; its exit status, or 1 if that is 0, something leaked and ``fail_on_leak``.

    The summary goes to stderr: stdout is the program's.
    """
    if not module and not os.path.exists(target):
        raise MetraleError(f"no such file: {target}")
    path = Path(output or f"metrale-audit.{os.getpid()}.json").absolute()
    _make_way(path)
    earlier = {found: _identity(found) for found in _files(path)}
    status = _child([sys.executable, *(["-m"] if module else []), target, *arguments], path)
    recorded = [found for found in _files(path) if earlier.get(found) != _identity(found)]
    leaked = False
    parts: list[str | Table] = []
    for found in recorded:
        said, lost = _summary(found)
        parts += said
        leaked = leaked or lost
    if not recorded:
        parts.append("metrale audit: the program opened no backend; nothing was recorded")
    try:
        print_tables(parts, sys.stderr)
        sys.stderr.flush()
    except BrokenPipeError:  # the status is what counts, also where nobody reads: at exit the rest must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return 1 if fail_on_leak and leaked and status == 0 else status


def _child(command: list[str], path: Path) -> int:
    """The exit status of ``command``, as a shell gives it."""
    with _signals_are_the_childs() as children:
        child = subprocess.Popen(command, env=os.environ | {"METRALE_AUDIT": str(path)})
        children.append(child)
        status = child.wait()
    return 128 - status if status < 0 else status


@contextmanager
def _signals_are_the_childs() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """A terminal sends Ctrl-C to both; this process waits for what the program makes of it. SIGTERM is passed on."""
    children: list[subprocess.Popen[bytes]] = []

    def nothing(number: int, frame: FrameType | None) -> None:
        pass

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    # A handler, unlike SIG_IGN, is not inherited by the child; a signal that is ignored already stays so.
    handlers = {signal.SIGINT: nothing, signal.SIGTERM: pass_on}
    before = {n: signal.signal(n, h) for n, h in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_way(path: Path) -> None:
    """Remove an earlier capture, which the program would take for another process's; nothing else is removed."""
    if not path.parent.is_dir():
        raise MetraleError(f"no such folder: {path.parent}")
    if path.exists():
        if path.stat().st_size:
            Capture.read(path)  # refuses what is none
        path.unlink()


def _files(path: Path) -> list[Path]:
    """The capture of the program itself, then those of its children."""
    children = sorted(
        found
        for found in path.parent.iterdir()
        if found.suffix == path.suffix and found.stem.rpartition(".")[0] == path.stem and found.stem[-1].isdigit()
    )
    return [path] * path.exists() + children


def _identity(path: Path) -> tuple[int, int, int]:
    facts = path.stat()
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _summary(path: Path) -> tuple[list[str | Table], bool]:
    """What to say of a capture, and whether something leaked."""
    try:
        if not path.stat().st_size:
            path.unlink()
            return [f"metrale audit: {path.name}: not written: the process was killed, or runs still"], False
        capture = Capture.read(path)
    except (FormatError, OSError) as error:
        return [f"metrale audit: {error}"], False
    parts: list[str | Table] = []
    leaked = False
    for backend in capture.backends:
        lost = leaks(backend)
        leaked = leaked or bool(lost)
        made = count_words(backend.memory) or "no allocation"
        parts.append(f"metrale audit: {backend_line(backend)}: peak {backend.peak_bytes:,} bytes, {made} in all")
        parts.append(f"metrale audit: {'leaked ' + count_words(lost) if lost else 'nothing leaked'}")
        parts.append(entry_table("Leaks", lost, SHOWN))
        if lost:
            parts.append("")
    parts.append(f"metrale audit: more by: metrale audit report {path}  (or with --html PAGE.html)")
    return parts, leaked
