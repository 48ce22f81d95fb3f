# SPDX-License-Identifier: MIT OR Apache-2.0
"""CudaContext: a device's primary context, with its memory, streams and events, through ``cuda.bindings.cydriver``."""

import _thread
import sys

from cpython.exc cimport PyErr_CheckSignals
from cuda.bindings cimport cydriver as cu
from libc.stdint cimport uint64_t
from libc.string cimport memset
from posix.unistd cimport usleep

from metrale.errors import CudaError, MetraleError, refuse

from metrale.gpu.atomic cimport atomic_add, atomic_read
from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.core cimport POLL_US
from metrale.gpu.driver cimport COPY_D2H, COPY_H2D, CopyKind, Rows

cdef extern from *:
    """
    #include <chrono>
    static inline long long metrale_now_ns() {
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }
    """
    long long now_ns "metrale_now_ns"() noexcept nogil

cdef extern from "sched.h" nogil:
    int sched_yield()

cpdef enum:
    CHUNK = 2 << 20                # bytes: what the driver gives memory in
    SHARED_MOST = 1 << 20          # bytes of an allocation that shares a chunk with others

cdef enum:
    SHARED_STEP = 512              # bytes: what such an allocation is rounded up to
    SPIN_NS = 20_000_000           # a wait that is longer than this can spare the time of a sleep
    SIGNALS_NS = 50_000_000        # between looks for Ctrl-C, which take the GIL from others


cdef class CudaContext(GpuBackend):
    """The part of ``CudaBackend`` that needs no kernel."""

    cdef int retain(self, int ordinal) except -1:
        """Take hold of the device's primary context, and read what the device is."""
        cdef cu.CUcontext context = NULL
        cdef cu.CUresult result
        cdef char name[256]
        self.kind = "cuda"
        self.after_fork = "CUDA does not survive a fork; start processes with 'spawn'"
        self.made_current = set()
        self.ordinal = ordinal
        check_result(cu.cuDeviceGet(&self.device, ordinal), "cuDeviceGet")
        check_result(cu.cuDriverGetVersion(&self.driver_version), "cuDriverGetVersion")
        check_result(cu.cuDeviceGetName(name, sizeof(name), self.device), "cuDeviceGetName")
        self.name = (<bytes>name).decode()
        self.sm_count = self.attribute(cu.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.compute_capability = (self.attribute(cu.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                                   self.attribute(cu.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
        self.overlaps = self.compute_capability >= (9, 0)
        self.max_shared_optin = self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.max_grid[:] = [self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                            self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                            self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)]
        self.max_block[:] = [self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                             self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                             self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)]
        with nogil:
            result = cu.cuDevicePrimaryCtxRetain(&context, self.device)
        check_result(result, "cuDevicePrimaryCtxRetain")
        self.context = context
        cdef int pushed
        try:
            pushed = self.enter()
            self.used_before = self.used()
            self.leave(pushed)
            self.foreign_before = foreign_bytes(ordinal)
            self.stream0 = self.driver_create_stream()
        except BaseException:
            cu.cuDevicePrimaryCtxRelease(self.device)
            raise
        return 0

    @property
    def overhead(self):
        """What the driver took of the device's memory beside allocations, in bytes, as its figures changed:
        ``streams`` and ``modules`` of this backend; ``before``, what was in use, by the context and by other
        processes, when the backend was opened; ``foreign_before``, what torch and CuPy held of that.
        """
        return {"before": self.used_before, "foreign_before": self.foreign_before, "streams": self.streams_took,
                "modules": self.modules_took}

    cdef size_t used(self) noexcept:
        """Of the device's memory, by whomever; between enter() and leave(). 0 where the driver does not say."""
        cdef size_t free = 0, total = 0
        cu.cuMemGetInfo(&free, &total)
        return total - free

    cdef size_t grown(self, size_t before) noexcept:
        """What is used more than ``before``; others may have given something back meanwhile."""
        cdef size_t now = self.used()
        return now - before if now > before else 0

    cdef int attribute(self, cu.CUdevice_attribute which) except? -1:
        cdef int value = 0
        check_result(cu.cuDeviceGetAttribute(&value, which, self.device), "cuDeviceGetAttribute")
        return value

    cdef int enter(self) except -1 nogil:
        """Before a driver call: make the context current. What it returns goes to leave(), without fail."""
        cdef cu.CUcontext current = NULL
        atomic_add(&self.in_flight, 1)
        cu.cuCtxGetCurrent(&current)
        if current == self.context and not atomic_read(<int*>&self.closed):
            return 0
        with gil:
            return self.enter_slowly(current)

    cdef int enter_slowly(self, cu.CUcontext current) except -1:
        """Where no context is current this one stays so, as after a call of the CUDA runtime; another comes back with
        leave()."""
        cdef cu.CUresult result = cu.CUDA_SUCCESS
        cdef bint pushed = current != self.context and current != NULL
        try:
            self.check_still_open()
            if pushed:
                result = cu.cuCtxPushCurrent(self.context)
            elif current == NULL:
                result = cu.cuCtxSetCurrent(self.context)
                self.made_current.add(_thread.get_ident())
            check_result(result, "making the context current")
        except BaseException:
            atomic_add(&self.in_flight, -1)
            raise
        return pushed

    cdef void leave(self, int pushed) noexcept nogil:
        """After a driver call: the context that was current is so again."""
        cdef cu.CUcontext popped = NULL
        if pushed:
            cu.cuCtxPopCurrent(&popped)
        atomic_add(&self.in_flight, -1)

    cdef int enter_freely(self, cu.CUstreamCaptureMode* mode) except -1:
        """``enter`` for a call that may wait for the device, such as an allocation: in a thread that captures, the
        driver would end the capture, though none of these touches what is captured."""
        cdef int pushed = self.enter()
        mode[0] = cu.CU_STREAM_CAPTURE_MODE_RELAXED
        cu.cuThreadExchangeStreamCaptureMode(mode)
        return pushed

    cdef void leave_freely(self, int pushed, cu.CUstreamCaptureMode* mode) noexcept:
        cu.cuThreadExchangeStreamCaptureMode(mode)
        self.leave(pushed)

    # memory

    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0:
        cdef cu.CUdeviceptr ptr = 0
        cdef void* host = NULL
        cdef cu.CUresult result
        cdef cu.CUstreamCaptureMode mode
        cdef bint pinned = kind == "pinned", managed = kind == "managed", pushed = self.enter_freely(&mode)
        with nogil:
            if pinned:
                result = cu.cuMemAllocHost(&host, nbytes)
                ptr = <cu.CUdeviceptr>host
            elif managed:
                result = cu.cuMemAllocManaged(&ptr, nbytes, cu.CU_MEM_ATTACH_GLOBAL)
            else:
                result = cu.cuMemAlloc(&ptr, nbytes)
        self.leave_freely(pushed, &mode)
        if result == cu.CUDA_ERROR_OUT_OF_MEMORY:
            return 0
        if result != cu.CUDA_SUCCESS:
            check_result(result, f"allocating {nbytes} bytes of {kind} memory")
        return ptr

    cdef size_t driver_rounded(self, size_t nbytes, str kind) except? 0:
        cdef size_t step = SHARED_STEP if nbytes <= SHARED_MOST else CHUNK
        return (nbytes + step - 1) // step * step

    cdef int driver_free(self, uint64_t ptr, str kind) except -1:
        cdef cu.CUresult result
        cdef cu.CUstreamCaptureMode mode
        cdef bint pinned = kind == "pinned", pushed = self.enter_freely(&mode)
        with nogil:
            result = cu.cuMemFreeHost(<void*>ptr) if pinned else cu.cuMemFree(<cu.CUdeviceptr>ptr)
        self.leave_freely(pushed, &mode)
        return 0 if result == cu.CUDA_SUCCESS else check_result(result, f"freeing {kind} memory at {ptr:#x}")

    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        cdef int ordinal = -1
        cdef cu.CUdeviceptr start = 0
        cdef cu.CUpointer_attribute asked[3]
        cdef void* answers[3]
        asked[0], answers[0] = cu.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &ordinal
        asked[1], answers[1] = cu.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, &start
        asked[2], answers[2] = cu.CU_POINTER_ATTRIBUTE_RANGE_SIZE, nbytes
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuPointerGetAttributes(3, asked, answers, <cu.CUdeviceptr>ptr)
        self.leave(pushed)
        if result != cu.CUDA_ERROR_INVALID_VALUE:
            check_result(result, "cuPointerGetAttributes")
        if result != cu.CUDA_SUCCESS or start == 0 or nbytes[0] == 0:
            return 0
        if ordinal != self.ordinal:
            refuse("ptr", f"{ptr:#x} on device {ordinal}", f"memory of device {self.ordinal}")
        base[0] = start
        return 1

    cdef int driver_memory(self, size_t* free, size_t* total) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuMemGetInfo(free, total)
        self.leave(pushed)
        return check_result(result, "cuMemGetInfo")

    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuMemsetD8Async(<cu.CUdeviceptr>ptr, <unsigned char>value, nbytes, <cu.CUstream>stream)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check_result(result, f"setting {nbytes} bytes at {ptr:#x}")

    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            if kind == COPY_H2D:
                result = cu.cuMemcpyHtoDAsync(<cu.CUdeviceptr>dst, <const void*>src, nbytes, <cu.CUstream>stream)
            elif kind == COPY_D2H:
                result = cu.cuMemcpyDtoHAsync(<void*>dst, <cu.CUdeviceptr>src, nbytes, <cu.CUstream>stream)
            else:
                result = cu.cuMemcpyDtoDAsync(<cu.CUdeviceptr>dst, <cu.CUdeviceptr>src, nbytes, <cu.CUstream>stream)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check_result(
            result, f"copying {nbytes} bytes from {src:#x} to {dst:#x}")

    cdef int driver_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef cu.CUDA_MEMCPY2D copy
        memset(&copy, 0, sizeof(copy))
        copy.srcMemoryType = copy.dstMemoryType = cu.CU_MEMORYTYPE_UNIFIED      # page-locked memory is taken too
        copy.srcDevice, copy.dstDevice = <cu.CUdeviceptr>src, <cu.CUdeviceptr>dst
        if rows.height > 1:      # the driver has a limit for pitches, and one row has none
            copy.srcPitch, copy.dstPitch = rows.src_pitch, rows.dst_pitch
        else:
            copy.srcPitch = copy.dstPitch = rows.width
        copy.WidthInBytes, copy.Height = rows.width, rows.height
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuMemcpy2DAsync(&copy, <cu.CUstream>stream)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check_result(
            result, f"copying {rows.height} rows of {rows.width} bytes from {src:#x} to {dst:#x}")

    cdef bint driver_is_pageable(self, uint64_t host) except -1:
        cdef unsigned int kind = 0
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuPointerGetAttribute(
            &kind, cu.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, <cu.CUdeviceptr>host)
        self.leave(pushed)
        if result == cu.CUDA_ERROR_INVALID_VALUE:      # no memory of the driver's
            return True
        check_result(result, "cuPointerGetAttribute")
        return False

    # streams and events

    cdef uint64_t driver_create_stream(self) except 0:
        cdef cu.CUstream stream = NULL
        cdef int pushed = self.enter()
        cdef size_t before = self.used()
        cdef cu.CUresult result = cu.cuStreamCreate(&stream, cu.CU_STREAM_NON_BLOCKING)
        self.streams_took += self.grown(before)
        self.leave(pushed)
        check_result(result, "cuStreamCreate")
        return <uint64_t>stream

    cdef int driver_destroy_stream(self, uint64_t stream) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamDestroy(<cu.CUstream>stream)
        self.leave(pushed)
        return check_result(result, "cuStreamDestroy")

    cdef int driver_synchronize(self, uint64_t stream) except -1:
        return self.wait(stream, False, "cuStreamSynchronize (an earlier launch may have failed)")

    cdef int wait(self, uint64_t handle, bint is_event, str what) except -1:
        """Wait for a stream or an event, and look for Ctrl-C meanwhile, which the driver's own waits do not let in."""
        cdef cu.CUresult result
        cdef cu.CUstreamCaptureMode mode
        cdef long long start = 0, waited = 0, looked = 0
        cdef int pushed = self.enter_freely(&mode)
        try:
            with nogil:
                while True:
                    result = cu.cuEventQuery(<cu.CUevent>handle) if is_event else cu.cuStreamQuery(<cu.CUstream>handle)
                    if result != cu.CUDA_ERROR_NOT_READY:
                        break
                    if start == 0:
                        start = now_ns()
                    waited = now_ns() - start
                    if waited < SPIN_NS:
                        sched_yield()
                    else:
                        usleep(POLL_US)
                    if waited - looked > SIGNALS_NS:
                        looked = waited
                        with gil:
                            self.let_signals_in()
        finally:
            self.leave_freely(pushed, &mode)
        return 0 if result == cu.CUDA_SUCCESS else check_result(result, what)

    cdef int let_signals_in(self) except -1:
        """In a call that is in flight: run signal handlers. One that closes the backend does not wait for this call,
        which ends here."""
        before, self.handler = self.handler, _thread.get_ident()
        self.handling += 1
        try:
            PyErr_CheckSignals()
        finally:
            self.handling -= 1
            self.handler = before
        if self.context == NULL:
            raise MetraleError(f"{self!r} is closed")
        return 0

    cdef uint64_t driver_create_event(self, bint timing) except 0:
        cdef cu.CUevent event = NULL
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventCreate(
            &event, cu.CU_EVENT_DEFAULT if timing else cu.CU_EVENT_DISABLE_TIMING)
        self.leave(pushed)
        check_result(result, "cuEventCreate")
        return <uint64_t>event

    cdef int driver_destroy_event(self, uint64_t event) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventDestroy(<cu.CUevent>event)
        self.leave(pushed)
        return check_result(result, "cuEventDestroy")

    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventRecord(<cu.CUevent>event, <cu.CUstream>stream)
        self.leave(pushed)
        return check_result(result, "cuEventRecord")

    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamWaitEvent(<cu.CUstream>stream, <cu.CUevent>event, 0)
        self.leave(pushed)
        return check_result(result, "cuStreamWaitEvent")

    cdef int driver_event_query(self, uint64_t event) except -1:
        cdef cu.CUstreamCaptureMode mode
        cdef int pushed = self.enter_freely(&mode)
        cdef cu.CUresult result = cu.cuEventQuery(<cu.CUevent>event)
        self.leave_freely(pushed, &mode)
        if result == cu.CUDA_ERROR_NOT_READY:
            return 0
        check_result(result, "cuEventQuery")
        return 1

    cdef int driver_event_synchronize(self, uint64_t event) except -1:
        return self.wait(event, True, "cuEventSynchronize")

    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1:
        cdef float ms = 0
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventElapsedTime(&ms, <cu.CUevent>start, <cu.CUevent>end)
        self.leave(pushed)
        check_result(result, "cuEventElapsedTime (both events need timing=True and a record)")
        return ms

    cdef int driver_close(self) except -1:
        cdef cu.CUresult result
        cdef cu.CUcontext current = NULL
        cu.cuCtxGetCurrent(&current)
        if current == self.context and _thread.get_ident() in self.made_current:
            cu.cuCtxSetCurrent(NULL)
        self.context = NULL
        with nogil:
            result = cu.cuDevicePrimaryCtxRelease(self.device)
        return check_result(result, "cuDevicePrimaryCtxRelease")


cdef int check_result(cu.CUresult result, str what) except -1:
    """Raise the CudaError for a result that is not success."""
    cdef const char* name = NULL
    if result == cu.CUDA_SUCCESS:
        return 0
    cu.cuGetErrorName(result, &name)
    raise CudaError(<int>result, name.decode() if name != NULL else "unknown error", what)


cdef size_t foreign_bytes(int ordinal) except? 0:
    """What other libraries of this process hold of the device, where they are loaded."""
    if "torch" not in sys.modules and "cupy" not in sys.modules:
        return 0
    from metrale.audit.foreign import holdings
    return sum(nbytes for nbytes, _ in holdings(ordinal).values())
