# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records the process that it is in. The runtime imports it where ``METRALE_AUDIT`` names a file, and before it
registers what closes the backends at exit: that comes first then, and marks what leaked."""

import atexit
import os
import platform
import sys
import threading
import time
from typing import Any

import metrale
from metrale.audit.capture import BackendCapture, Capture, Process
from metrale.errors import ArgumentError

__all__ = ["opened", "write"]


class _Recording:
    """The ledgers of this process, and the file that it has claimed."""

    def __init__(self, path: str) -> None:
        self.start_ns = time.time_ns()
        self.path = _claim(path)
        self.ledgers: list[tuple[str, str, int, Any]] = []

    def capture(self) -> Capture:
        backends = [BackendCapture.of(*ledger) for ledger in self.ledgers]
        # Of a backend's making there may be records from before it was handed over.
        start_ns = min([self.start_ns, *(entry.time_ns for backend in backends for entry in backend.entries[:1])])
        process = Process(
            argv=sys.orig_argv or sys.argv,
            cwd=os.getcwd(),
            pid=os.getpid(),
            parent=os.getppid(),
            python=platform.python_version(),
            metrale=metrale.__version__,
            start_ns=start_ns,
            end_ns=time.time_ns(),
        )
        return Capture(process, backends)


# As the environment and the folder are now: a program may change both. Without the variable nothing is opened here.
_FILE = os.path.abspath(os.environ.get("METRALE_AUDIT", ""))
_recording: _Recording | None = None
_lock = threading.Lock()


def opened(gpu: Any) -> None:
    """Record ``gpu`` from here on: nothing that it frees is forgotten. ArgumentError if the file cannot be made."""
    global _recording
    with _lock:
        if _recording is None:
            _recording = _Recording(_FILE)
            _write_in_workers()
        gpu.ledger.history = None
        _recording.ledgers.append((gpu.name, gpu.kind, gpu.total_memory, gpu.ledger))


@atexit.register
def write() -> None:
    """Write the capture of the process as it is; a file that cannot be written is a line on stderr."""
    if _recording is not None:
        try:
            _recording.capture().write(_recording.path)
        except OSError as error:
            print(f"metrale audit: the capture is lost: {error}", file=sys.stderr)


def _claim(path: str) -> str:
    """Make the file, so that no other process takes it; beside one that is there, with the process's number."""
    stem, suffix = os.path.splitext(path)
    own = f"{stem}.{os.getpid()}{suffix}"
    for candidate in (path, own):
        try:
            os.close(os.open(candidate, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return candidate
        except FileExistsError:
            continue
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise ArgumentError(f"METRALE_AUDIT: got {path!r}, allowed: {allowed}") from error
    return own  # left by a process that had the same number


def _write_in_workers() -> None:
    """A worker of multiprocessing that was forked ends without the functions of atexit, but with its own."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, write, exitpriority=-100)


def _forget() -> None:
    """In a forked child: the backends are the parent's, and so is the file."""
    global _recording, _lock
    _recording, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
