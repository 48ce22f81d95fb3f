# SPDX-License-Identifier: MIT OR Apache-2.0
"""Threads that read parts of experts into memory, what is waited for first."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

from metrale.errors import MetraleError
from metrale.gpu import GpuBackend
from metrale.moe_v41._staging import begin_read, end_read

__all__ = ["Read", "Readers"]

Part = Callable[[], None]


class Read:
    """A read that several threads share: its parts, how many are not done yet, and the first error of any."""

    __slots__ = ("background", "error", "left", "parts", "queued")

    def __init__(self, background: bool) -> None:
        self.parts: list[Part] = []
        self.left = 0
        self.background = background
        self.queued = False
        self.error: BaseException | None = None

    def add(self, function: Callable[..., None], *arguments: Any) -> None:
        """A part of it."""
        self.parts.append(partial(function, *arguments))
        self.left += 1

    @property
    def done(self) -> bool:
        """Whether no part is being read any more, or will be."""
        return self.left == 0


class Readers:
    """``count`` daemon threads, started with the first read. Background reads leave one of them to the others, and come
    after them. While a part is read, the backend's ``close()`` waits."""

    def __init__(self, gpu: GpuBackend, count: int) -> None:
        self._gpu = gpu
        self._count = count
        self._urgent: deque[tuple[Read, Part]] = deque()
        self._background: deque[tuple[Read, Part]] = deque()
        self._in_background = 0  # threads that read such a part
        self._stopped = False
        self._lock = threading.RLock()  # the arena may be collected as garbage anywhere, here too
        self._work, self._progress = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def submit(self, read: Read) -> None:
        """Read the parts of ``read``, one thread each."""
        if self._stopped:
            raise MetraleError("the ExpertArena has been freed")
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name="metrale-expert-reader", daemon=True)
            thread.start()
            self._threads.append(thread)
        items = [(read, part) for part in read.parts]
        with self._lock:
            (self._background if read.background else self._urgent).extend(items)
            read.queued = True
            self._work.notify(len(items))

    def hasten(self, read: Read) -> None:
        """A background read is waited for from now on."""
        with self._lock:
            read.background = False
            parts = [item for item in self._background if item[0] is read]
            for item in parts:
                self._background.remove(item)
            self._urgent.extend(parts)
            self._work.notify(len(parts))

    def wait(self, reads: Collection[Read]) -> None:
        """Until one of ``reads`` is done."""
        with self._progress:
            self._progress.wait_for(lambda: any(read.done for read in reads))

    def stop(self) -> None:
        """End the threads once they have read what they are at; what has not begun is not read. One of the threads
        does not wait for them."""
        with self._lock:
            self._stopped = True
            self._work.notify_all()
            if self.is_current():
                return
            for read, _ in (*self._urgent, *self._background):
                read.error = read.error or MetraleError("the ExpertArena has been freed")
                read.left -= 1
            self._urgent.clear()
            self._background.clear()
            self._progress.notify_all()
        for thread in self._threads:
            thread.join()

    def is_current(self) -> bool:
        """Whether one of the threads asks."""
        return threading.current_thread() in self._threads

    def _next(self) -> tuple[Read, Part, bool] | None:
        """What to read next, and whether that is in the background; None at the end."""
        while not self._stopped:
            if self._urgent:
                return *self._urgent.popleft(), False
            if self._background and self._in_background < max(1, self._count - 1):
                self._in_background += 1
                return *self._background.popleft(), True
            self._work.wait()
        return None

    def _serve(self) -> None:
        while True:
            with self._lock:
                item = self._next()
            if item is None:
                return
            read, part, background = item
            error = self._attempt(part)
            with self._lock:
                read.error = read.error or error
                read.left -= 1
                if background:
                    self._in_background -= 1
                self._progress.notify_all()
            del item, read, part, error  # a thread that waits keeps nothing alive

    def _attempt(self, part: Part) -> BaseException | None:
        try:
            begin_read(self._gpu)
            try:
                part()
            finally:
                end_read(self._gpu)
        except BaseException as error:
            forget_locals(error)
            return error
        return None


def forget_locals(error: BaseException) -> None:
    """Keep no memory alive through the functions that raised ``error``; where they did stays known."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        with suppress(RuntimeError):
            traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
