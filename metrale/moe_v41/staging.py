# SPDX-License-Identifier: MIT OR Apache-2.0
"""Staging: page-locked memory through which experts go to the device, and the stream that copies them."""

from collections import deque
from collections.abc import Iterable

from metrale.gpu import DevicePtr, GpuBackend, PinnedBuffer
from metrale.gpu.owner import Owner
from metrale.moe_v41._staging import queue_copy

__all__ = ["Place", "Staging"]


class Place:
    """Room for one expert, ``offset`` bytes into the page-locked memory, and the event of the copy from there."""

    __slots__ = ("event", "offset", "order", "slot")

    def __init__(self, offset: int, event: int) -> None:
        self.offset = offset
        self.event = event
        self.slot = -1  # what it was copied to last
        self.order = 0  # of that copy: they are done one after another


class Staging:
    """``count`` places of ``nbytes`` bytes each. ``own`` gets the stream and the events; the page-locked memory is
    ``ring``, which is freed after ``wait()``."""

    def __init__(self, gpu: GpuBackend, own: Owner, count: int, nbytes: int) -> None:
        self._gpu = gpu
        self._nbytes = nbytes
        self._stream, self._released = own.stream(), own.event()
        events = [own.event() for _ in range(count)]
        self.ring: PinnedBuffer = gpu.pinned_buffer(count * nbytes, "ExpertArena.staging")
        self.idle = [Place(n * nbytes, event) for n, event in enumerate(events)]
        self._copies: deque[Place] = deque()  # in the order of the stream
        self._doubtful: list[Place] = []  # copies that may have been queued, and no event tells when they are done
        self._arriving: dict[int, Place] = {}  # slot -> where its copy came from, which may not be done
        self._order = 0

    def take(self, wait: bool) -> Place | None:
        """An idle place; with ``wait``, also one that is idle once a copy is done. None if all are being read to."""
        self.collect()
        if not self.idle and wait:
            self.settle()
            if not self.idle and self._copies:
                self._gpu.event_synchronize(self._copies[0].event)
                self.collect()
        return self.idle.pop() if self.idle else None

    def collect(self) -> None:
        """Take back the places whose copies are done."""
        while self._copies and self._gpu.event_query(self._copies[0].event):
            place = self._copies.popleft()
            if self._arriving.get(place.slot) is place:
                del self._arriving[place.slot]
            self.idle.append(place)

    def settle(self) -> None:
        """Take back the places of which it is not known whether a copy was queued."""
        if self._doubtful:
            self.wait()
            self.idle += self._doubtful
            self._doubtful.clear()

    def wait(self) -> None:
        """Until all copies are done."""
        self._gpu.synchronize(self._stream)

    def copy(self, place: Place, slot: int, dst: DevicePtr) -> None:
        """Copy what is in ``place`` to ``slot``, which is at ``dst``, after what was released by now."""
        try:
            queue_copy(self._gpu, self.ring.ptr + place.offset, dst, self._nbytes, self._stream)
            self._gpu.record_event(place.event, self._stream)
        except BaseException:
            self._doubtful.append(place)
            raise
        self._order += 1
        place.slot, place.order = slot, self._order
        self._copies.append(place)
        self._arriving[slot] = place

    def release(self, stream: int) -> None:
        """Copies come after what is queued on ``stream`` by now."""
        self._gpu.record_event(self._released, stream)
        self._gpu.stream_wait_event(self._stream, self._released)

    def order_after(self, stream: int, slots: Iterable[int]) -> None:
        """Make ``stream`` wait until what was copied to ``slots`` is there."""
        if self._copies:
            self.collect()
        if self._arriving:
            arriving = [self._arriving[slot] for slot in slots if slot in self._arriving]
            if arriving:
                self._gpu.stream_wait_event(stream, max(arriving, key=lambda place: place.order).event)
