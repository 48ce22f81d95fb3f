# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostBackend: the package's kernels, compiled for the CPU, on host memory.

Work is done when it is queued: every stream is idle at every moment, and an event holds the time of its record. Only
in a capture it is written down, and done when the graph is launched.
"""

import _thread
import os
import time

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free as c_free_memory
from posix.stdlib cimport posix_memalign
from libc.string cimport memcpy, memset

from metrale.errors import LaunchError, MetraleError, refuse
from metrale.gpu import hostlib, sources

from metrale.gpu.atomic cimport atomic_add
from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.core cimport POLL_US
from metrale.gpu.driver cimport (
    CAPTURE_ACTIVE, CAPTURE_INVALIDATED, CAPTURE_NONE, COPY_D2D, LAUNCH_CLUSTER, LAUNCH_COOPERATIVE, CaptureStatus,
    CopyKind, Launch, Rows, copy_launch,
)
from metrale.gpu.interop cimport as_integer
from metrale.gpu.kernel cimport KernelHandle, kind_of, param_code
from metrale.gpu.ledger cimport Allocation
from metrale.gpu.recording cimport LaunchStep, Recorder, Recording, launch_step

cdef extern from "dlfcn.h" nogil:
    enum: RTLD_NOW, RTLD_LOCAL
    void* dlopen(const char* path, int flags)
    void* dlsym(void* library, const char* name)
    char* dlerror()

cdef extern from "host/abi.h" nogil:
    enum:
        METRALE_MAX_GRID_X, METRALE_MAX_GRID_Y, METRALE_MAX_GRID_Z
        METRALE_MAX_BLOCK_X, METRALE_MAX_BLOCK_Y, METRALE_MAX_BLOCK_Z
        METRALE_MAX_THREADS, METRALE_MAX_SHARED_BYTES
    ctypedef struct metrale_param:
        const char* name
        unsigned char kind
        unsigned char is_signed
        uint32_t size
    ctypedef struct metrale_host_kernel:
        const char* module
        const char* name
        uint32_t n_params
        const metrale_param* params
    ctypedef struct metrale_host_config:
        uint32_t grid[3]
        uint32_t block[3]
        size_t shared_bytes
        int order
        uint64_t seed
        int strict
        uint32_t workers

ctypedef const metrale_host_kernel* (*kernels_fn)(size_t*) noexcept nogil
ctypedef int (*launch_fn)(const metrale_host_kernel*, const metrale_host_config*, void**, char*, size_t) noexcept nogil

cdef enum:
    ALIGNMENT = 256
    FIRST_HANDLE = 0x1000          # streams and events: never 0, which means the legacy stream
    POISON = 0xFF                  # NaN in every float format: a read of what nothing wrote shows
    MAX_WORKERS = 1024
    MESSAGE_BYTES = 1024

cdef size_t LARGE = 64 << 20       # bytes: from here on an allocation is held against what the system has

_ORDERS = {"forward": 0, "reversed": 1, "shuffled": 2}


cdef class HostBackend(GpuBackend):
    """Runs kernels on this machine's cores.

    ``order`` is the order in which the threads of a block run between barriers: "forward", "reversed" or
    "shuffled" by ``seed``; a kernel that lacks a barrier gives other results in another order. ``strict`` counts
    threads that have returned as missing at a barrier. ``workers`` is the number of OS threads (0: all cores).
    """

    cdef dict modules             # module -> {kernel: (address of its record, of its library's launch function)}
    cdef uint64_t next_handle
    cdef Recorder recorder
    cdef dict recorded            # graph or executable -> its steps: a LaunchStep, or a tuple that do() knows
    cdef dict event_times         # event -> [timing, ns of the last record or 0]
    cdef readonly str order
    cdef readonly uint64_t seed
    cdef int order_code
    cdef readonly bint strict
    cdef readonly int workers
    cdef int running[2]           # work without the GIL, by the phase it began in
    cdef int phase
    cdef object freeing           # a lock: one thread waits for running work at a time

    def __init__(self, order="forward", seed=0, strict=False, workers=0, library=None, check=False,
                 redzone=False):
        self.starting(check, redzone)
        if order not in _ORDERS:
            refuse("order", order, ", ".join(_ORDERS))
        self.kind = "host"
        self.after_fork = "a child process opens its own"
        self.workers = as_integer(workers, "workers", MAX_WORKERS, f"0 (all cores) to {MAX_WORKERS}")
        self.sm_count = self.workers or len(os.sched_getaffinity(0))
        self.compute_capability = (0, 0)
        self.overlaps = True      # without effect
        self.name = f"host ({self.sm_count} cores)"
        self.order, self.order_code = order, _ORDERS[order]
        self.seed = as_integer(seed, "seed", 0xFFFFFFFFFFFFFFFF, "0 to 2**64 - 1")
        self.strict = strict
        self.modules = {}
        self.event_times = {}
        self.recorder = Recorder()
        self.recorded = {}
        self.freeing = _thread.RLock()
        self.next_handle = FIRST_HANDLE
        self.max_grid[:] = [METRALE_MAX_GRID_X, METRALE_MAX_GRID_Y, METRALE_MAX_GRID_Z]
        self.max_block[:] = [METRALE_MAX_BLOCK_X, METRALE_MAX_BLOCK_Y, METRALE_MAX_BLOCK_Z]
        self.load(library or hostlib.default_library())
        self.stream0 = self.new_handle()
        self.opened()

    def add_module(self, path):
        """Add kernels: a ``.cu`` file, compiled with the C++ compiler, or a library built by ``cuda/host/build.py``.

        A ``.cu`` file is a module of its stem's name. Returns the names of the modules added.
        """
        self.check_open()
        path = os.fspath(path)
        with self.loading:
            return self.load(hostlib.compile(path) if path.endswith(".cu") else path)

    def has_module(self, module):
        return module in self.modules

    cdef list load(self, path):
        cdef bytes encoded = os.fsencode(os.path.abspath(path))
        cdef void* library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
        if library == NULL:
            raise MetraleError(f"host kernels: {(<bytes>dlerror()).decode()}")
        cdef kernels_fn kernels = <kernels_fn>dlsym(library, b"metrale_host_kernels")
        cdef void* start = dlsym(library, b"metrale_host_launch")
        if kernels == NULL or start == NULL:
            raise MetraleError(f"host kernels: {path} was not built by cuda/host/build.py")
        cdef size_t count = 0, i
        cdef const metrale_host_kernel* record = kernels(&count)
        added = {}
        for i in range(count):
            module, name = (<bytes>record[i].module).decode(), (<bytes>record[i].name).decode()
            added.setdefault(module, {})[name] = (<uint64_t>&record[i], <uint64_t>start)
        taken = self.modules.keys() & added.keys()
        if taken:
            refuse("path", path, f"modules that are not there yet ({', '.join(sorted(taken))} would be loaded twice)")
        self.modules.update(added)
        self.ledger.add_handle(<uint64_t>library, "module", os.path.basename(path), os.path.getsize(path))
        return sorted(added)

    cdef uint64_t new_handle(self):
        self.next_handle += 1
        return self.next_handle

    cdef int check_stream(self, uint64_t stream) except -1:
        if stream not in (0, self.stream0, self.scanning) and stream not in self.ledger.live_streams:
            refuse("stream", stream, "0, or a live stream of this backend")
        return 0

    cdef int begin(self) noexcept:
        """Around work without the GIL: what begin() returns goes to end()."""
        atomic_add(&self.in_flight, 1)
        self.running[self.phase] += 1
        return self.phase

    cdef void end(self, int phase) noexcept:
        self.running[phase] -= 1
        atomic_add(&self.in_flight, -1)

    cdef int wait_for_running(self) except -1:
        """Wait for the work of other threads that has begun, as a GPU's driver does before it frees memory."""
        cdef int phase, _
        if self.running[0] == 0 and self.running[1] == 0:
            return 0
        with self.freeing:      # of this thread: a signal handler may free memory during the wait
            for _ in range(2):      # a wait that was interrupted, or still goes on, leaves work in both phases
                phase = self.phase
                self.phase = 1 - phase      # what begins from now on is not waited for in this turn
                while self.running[phase] > 0:
                    time.sleep(POLL_US * 1e-6)
                    PyErr_CheckSignals()
        return 0

    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0:
        cdef void* p = NULL
        cdef int failed, phase
        cdef size_t free = 0, total = 0
        if nbytes > LARGE:      # the system would promise more than it has, and kill the process that takes it
            self.driver_memory(&free, &total)
            if nbytes > free:
                return 0
        phase = self.begin()
        with nogil:
            failed = posix_memalign(&p, ALIGNMENT, nbytes)
            if not failed:
                memset(p, POISON, nbytes)
        self.end(phase)
        return 0 if failed else <uint64_t>p

    cdef size_t driver_rounded(self, size_t nbytes, str kind) except? 0:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    cdef int driver_free(self, uint64_t ptr, str kind) except -1:
        self.wait_for_running()
        c_free_memory(<void*>ptr)
        return 0

    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        return 0

    cdef bint is_foreign(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        """Memory of the process. What has been freed stays mapped: what the ledger remembers is not foreign, nor is
        the end of an allocation."""
        cdef Allocation a = self.ledger.before(ptr)
        if self.ledger.freed(ptr) is not None or (a is not None and ptr - a.ptr <= a.nbytes + self.band):
            return False
        with open("/proc/self/maps") as lines:
            for line in lines:
                start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
                if start <= ptr < end:
                    base[0], nbytes[0] = start, end - start
                    return True
        return False

    cdef int driver_memory(self, size_t* free, size_t* total) except -1:
        """What the system says can be had without swapping."""
        with open("/proc/meminfo") as lines:
            facts = dict(line.split(":") for line in lines)
        free[0] = 1024 * int(facts["MemAvailable"].split()[0])
        total[0] = 1024 * int(facts["MemTotal"].split()[0])
        return 0

    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        self.check_stream(stream)
        if self.recorder.add(stream, ("memset", ptr, value, nbytes)):
            return 0
        cdef int phase = self.begin()
        with nogil:
            memset(<void*>ptr, value, nbytes)
        self.end(phase)
        return 0

    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1:
        self.check_stream(stream)
        if self.recorder.add(stream, ("copy", dst, src, nbytes)):
            return 0
        cdef int phase = self.begin()
        with nogil:
            memcpy(<void*>dst, <const void*>src, nbytes)
        self.end(phase)
        return 0

    cdef uint64_t driver_create_stream(self) except 0:
        return self.new_handle()

    cdef int driver_destroy_stream(self, uint64_t stream) except -1:
        return 0

    cdef int driver_synchronize(self, uint64_t stream) except -1:
        return self.check_stream(stream)

    cdef uint64_t driver_create_event(self, bint timing) except 0:
        cdef uint64_t event = self.new_handle()
        self.event_times[event] = [timing, 0]
        return event

    cdef int driver_destroy_event(self, uint64_t event) except -1:
        del self.event_times[event]
        return 0

    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1:
        self.check_stream(stream)
        self.recorder.record_event(event, stream)
        self.event_times[event][1] = time.perf_counter_ns()
        return 0

    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        self.check_stream(stream)
        return self.recorder.stream_wait_event(stream, event)

    cdef int driver_event_query(self, uint64_t event) except -1:
        return 1

    cdef int driver_event_synchronize(self, uint64_t event) except -1:
        return 0

    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1:
        times = [self.event_times[start], self.event_times[end]]
        if not all(timing and ns for timing, ns in times):
            refuse("start, end", (start, end), "events made with timing=True that have been recorded")
        return (times[1][1] - times[0][1]) * 1e-6

    cdef KernelHandle driver_kernel(self, str module, str name):
        cdef KernelHandle handle = self.new_kernel(module, name)
        cdef const metrale_host_kernel* record
        cdef uint32_t i
        if name not in self.modules.get(module, ()):
            raise sources.not_found(module, name, self.modules)
        address, start = self.modules[module][name]
        record = <const metrale_host_kernel*><uint64_t>address
        handle.function = <void*>record
        handle.launcher = <void*><uint64_t>start
        handle.max_threads = METRALE_MAX_THREADS
        handle.max_shared = METRALE_MAX_SHARED_BYTES
        codes = [param_code(record.params[i].kind, record.params[i].size) for i in range(record.n_params)]
        declared = sources.signatures().get(module, {}).get(name)
        if declared is None:
            declared = tuple([((<bytes>record.params[i].name).decode(),
                               kind_of(codes[i]).replace("u", "i" if record.params[i].is_signed else "u"))
                              for i in range(record.n_params)])
        handle.set_params(declared, codes)
        return handle

    cdef int driver_check_special(self, KernelHandle kernel, Launch* l) except -1:
        """Blocks run one after another: none waits for another, in a cluster or a cooperative grid."""
        where = f"{kernel.module}.{kernel.name}"
        if l.flags & LAUNCH_CLUSTER and tuple(l.cluster) != (1, 1, 1):
            raise LaunchError(f"{where}: cluster: got {tuple(l.cluster)}, allowed: (1, 1, 1) on the host")
        if l.flags & LAUNCH_COOPERATIVE and tuple(l.grid) != (1, 1, 1):
            raise LaunchError(f"{where}: grid: got {tuple(l.grid)}, allowed: (1, 1, 1) in a cooperative launch on the "
                              "host")
        return 0

    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
        cdef metrale_host_config config
        cdef char message[MESSAGE_BYTES]
        cdef int failed, phase
        config.grid[0], config.grid[1], config.grid[2] = l.grid[0], l.grid[1], l.grid[2]
        config.block[0], config.block[1], config.block[2] = l.block[0], l.block[1], l.block[2]
        config.shared_bytes = l.shared_bytes
        config.order, config.seed = self.order_code, self.seed
        config.strict, config.workers = self.strict, self.workers
        with gil:
            self.check_open()
            self.check_stream(stream)
            if self.recorder.streams and self.recorder.add(stream, launch_step(kernel, l)):
                return 0
            phase = self.begin()
        failed = (<launch_fn>kernel.launcher)(
            <const metrale_host_kernel*>kernel.function, &config, l.args, message, MESSAGE_BYTES)
        with gil:
            self.end(phase)
            if failed:
                raise LaunchError((<bytes>message).decode(errors="replace"))
        return 0

    cdef int driver_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1:
        cdef size_t row
        self.check_stream(stream)
        if self.recorder.add(stream, ("rows", dst, src, rows.width, rows.height, rows.src_pitch, rows.dst_pitch)):
            return 0
        cdef int phase = self.begin()
        with nogil:
            for row in range(rows.height):
                memcpy(<void*>(dst + row * rows.dst_pitch), <const void*>(src + row * rows.src_pitch), rows.width)
        self.end(phase)
        return 0

    cdef bint driver_is_pageable(self, uint64_t host) except -1:
        return True

    # graphs

    cdef CaptureStatus driver_capture_status(self, uint64_t stream, uint64_t* id,
                                             uint64_t* node) except? CAPTURE_INVALIDATED:
        cdef Recording recording = self.recorder.streams.get(stream)
        if recording is None:
            return CAPTURE_NONE
        if id != NULL:
            id[0] = recording.id
        if node != NULL:      # the number of its last step
            node[0] = recording.before[stream].bit_length()
        return CAPTURE_ACTIVE

    cdef int driver_begin_capture(self, uint64_t stream) except -1:
        self.check_stream(stream)
        return self.recorder.begin(stream)

    cdef uint64_t driver_end_capture(self, uint64_t stream) except 0:
        steps = self.recorder.end(stream)
        graph = self.new_handle()
        self.recorded[graph] = steps
        return graph

    cdef uint64_t driver_instantiate(self, uint64_t graph) except 0:
        executable = self.new_handle()
        self.recorded[executable] = self.recorded[graph]
        return executable

    cdef int driver_destroy_graph(self, uint64_t graph, uint64_t executable) except -1:
        self.recorded.pop(graph, None)
        self.recorded.pop(executable, None)
        return 0

    cdef int driver_launch_graph(self, uint64_t executable, uint64_t stream) except -1:
        cdef int phase = self.begin()      # close() and free() wait for the whole graph, not for a step
        try:
            for step in self.recorded[executable]:
                self.do(step, stream)
        finally:
            self.end(phase)
        return 0

    cdef int driver_update_node(self, uint64_t executable, uint64_t node, KernelHandle kernel, Launch* l) except -1:
        cdef LaunchStep step = self.recorded[executable][node - 1]
        copy_launch(&step.launch, l)
        return 0

    cdef int do(self, step, uint64_t stream) except -1:
        """Do a step of a graph on ``stream``."""
        cdef LaunchStep launch
        cdef KernelHandle kernel
        cdef Rows rows
        if isinstance(step, LaunchStep):
            launch = step
            kernel = launch.kernel
            with nogil:
                return self.driver_launch(kernel, &launch.launch, stream)
        if step[0] == "memset":
            return self.driver_memset(step[1], step[2], step[3], stream)
        if step[0] == "copy":
            return self.driver_copy(COPY_D2D, step[1], step[2], step[3], stream)
        rows.width, rows.height, rows.src_pitch, rows.dst_pitch = step[3], step[4], step[5], step[6]
        return self.driver_copy_rows(step[1], step[2], &rows, stream)

    cdef int driver_close(self) except -1:
        return 0
