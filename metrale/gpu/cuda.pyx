# SPDX-License-Identifier: MIT OR Apache-2.0
"""CudaBackend: the CUDA driver API through ``cuda.bindings.cydriver``."""

import _thread
from pathlib import Path

from cuda.bindings cimport cydriver as cu
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from metrale.errors import CudaError, MetraleError, refuse
from metrale.gpu import cubin, signatures, sources

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport COPY_D2H, COPY_H2D, CopyKind, Launch
from metrale.gpu.interop cimport as_handle
from metrale.gpu.kernel cimport KIND_ANY, MAX_PARAMS, KernelHandle, param_code

cdef enum:
    DEFAULT_SHARED = 48 * 1024     # shared bytes a block may have without opting in


cdef class CudaBackend(GpuBackend):
    """One CUDA device, through its primary context, which torch and CuPy share.

    The default stream is the backend's own and, like all its streams, does not wait for the legacy stream; stream
    0 means the legacy stream. Errors: ``CudaError`` with the driver's name and number.
    """

    cdef cu.CUdevice device
    cdef cu.CUcontext context
    cdef dict modules             # module -> (CUmodule, {kernel: params} or None where only sizes are known)
    cdef set added                # modules of add_module
    cdef set made_current         # threads where no context was current before
    cdef readonly int ordinal
    cdef readonly int driver_version     # 1000 * major + 10 * minor
    cdef int max_shared_optin

    def __init__(self, device=0):
        cdef cu.CUcontext context = NULL
        cdef cu.CUresult result
        self.starting()
        count = device_count()
        if as_handle(device, "device") >= count:
            refuse("device", device, f"0 to {count - 1}" if count else "nothing: there is no CUDA device")
        self.kind = "cuda"
        self.after_fork = "CUDA does not survive a fork; start processes with 'spawn'"
        self.modules = {}
        self.added = set()
        self.made_current = set()
        self.ordinal = device
        check(cu.cuDeviceGet(&self.device, device), "cuDeviceGet")
        check(cu.cuDriverGetVersion(&self.driver_version), "cuDriverGetVersion")
        cdef char name[256]
        check(cu.cuDeviceGetName(name, sizeof(name), self.device), "cuDeviceGetName")
        self.name = (<bytes>name).decode()
        self.sm_count = self.attribute(cu.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.compute_capability = (self.attribute(cu.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                                   self.attribute(cu.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
        self.max_shared_optin = self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.max_grid[:] = [self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                            self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                            self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)]
        self.max_block[:] = [self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                             self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                             self.attribute(cu.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)]
        with nogil:
            result = cu.cuDevicePrimaryCtxRetain(&context, self.device)
        check(result, "cuDevicePrimaryCtxRetain")
        self.context = context
        try:
            self.stream0 = self.driver_create_stream()
        except BaseException:
            cu.cuDevicePrimaryCtxRelease(self.device)
            raise
        self.opened()

    @property
    def arch(self):
        """The compilation target of this device, such as ``sm_90a``."""
        return cubin.architecture(self.compute_capability)

    def add_module(self, path):
        """Add kernels: a ``.cu`` file, compiled with NVRTC, or a ``.cubin``, whose parameters are known by size only.

        The module is named after the file's stem. Returns the names of the modules added.
        """
        self.check_open()
        path = Path(path)
        if path.suffix not in (".cu", ".cubin"):
            refuse("path", str(path), "a .cu or .cubin file")
        with self.loading:
            if self.has_module(path.stem):
                refuse("path", str(path), f"modules that are not there yet ({path.stem} would be loaded twice)")
            self.load(path)
            self.added.add(path.stem)
        return [path.stem]

    def has_module(self, module):
        return module in self.added or module in sources.signatures()

    cdef int attribute(self, cu.CUdevice_attribute which) except? -1:
        cdef int value = 0
        check(cu.cuDeviceGetAttribute(&value, which, self.device), "cuDeviceGetAttribute")
        return value

    cdef int enter(self) except -1:
        """Before a driver call: make the context current. What it returns goes to leave(), without fail.

        Where none is current this one stays so, as after a call of the CUDA runtime; another comes back with leave().
        """
        cdef cu.CUcontext current = NULL
        cdef cu.CUresult result
        self.in_flight += 1
        cu.cuCtxGetCurrent(&current)
        if current == self.context:
            return 0
        if current == NULL:
            result = cu.cuCtxSetCurrent(self.context)
            self.made_current.add(_thread.get_ident())
        else:
            result = cu.cuCtxPushCurrent(self.context)
        if result != cu.CUDA_SUCCESS:
            self.in_flight -= 1
            check(result, "making the context current")
        return current != NULL

    cdef void leave(self, int pushed) noexcept:
        """After a driver call: the context that was current is so again."""
        cdef cu.CUcontext popped = NULL
        if pushed:
            cu.cuCtxPopCurrent(&popped)
        self.in_flight -= 1

    # modules and kernels

    cdef int load(self, path) except -1:
        """Load the module at ``path`` (a Path) and remember the parameters its source declares."""
        cdef cu.CUmodule handle = NULL
        cdef cu.CUresult result
        cdef bytes image
        if path.suffix == ".cubin":
            image, declared = path.read_bytes(), None
        elif path == sources.CUDA_DIR / path.name:
            image, declared = cubin.cubin(path, self.arch), sources.signatures()[path.stem]
        else:
            image = cubin.cubin(path, self.arch)
            declared = signatures.parse(path.read_text(errors="replace"), strict=False)
        cdef const char* data = image
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuModuleLoadData(&handle, data)
        self.leave(pushed)
        check(result, f"loading kernel module {path.stem}")
        self.modules[path.stem] = (<uintptr_t>handle, declared)
        return 0

    cdef KernelHandle driver_kernel(self, str module, str name):
        cdef KernelHandle kernel = self.new_kernel(module, name)
        cdef cu.CUfunction function = NULL
        cdef cu.CUresult result
        cdef size_t offset = 0, size = 0
        cdef int value = 0
        if not self.has_module(module):
            raise sources.not_found(module, None, {**sources.signatures(), **dict.fromkeys(self.added, ())})
        if module not in self.modules:
            self.load(sources.source_path(module))
        handle, declared = self.modules[module]
        # A kernel made by a macro is not among the declared: then only its parameters' sizes are known.
        params = (declared or {}).get(name)
        cdef int pushed = self.enter()
        try:
            result = cu.cuModuleGetFunction(&function, <cu.CUmodule><uintptr_t>handle, name.encode())
            if result == cu.CUDA_ERROR_NOT_FOUND:
                raise sources.not_found(module, name, {module: declared or ()})
            check(result, f"looking up kernel {module}.{name}")
            # One index too many is an error to tools that watch the driver. The package's own sources are known to
            # declare what is there; what a user's seems to declare is held against all that the binary has.
            limit = MAX_PARAMS + 1 if params is None or module in self.added else len(params)
            codes = []
            while len(codes) < limit and (
                    cu.cuFuncGetParamInfo(function, len(codes), &offset, &size) == cu.CUDA_SUCCESS):
                codes.append(param_code(KIND_ANY, <uint32_t>size))
            check(cu.cuFuncGetAttribute(&value, cu.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function), name)
            kernel.max_threads = value
            check(cu.cuFuncGetAttribute(&value, cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), name)
        finally:
            self.leave(pushed)
        kernel.max_shared = max(0, self.max_shared_optin - value)
        kernel.shared_opted = max(0, DEFAULT_SHARED - value)
        kernel.function = <void*>function
        try:
            kernel.set_params(params if params is not None else by_size(codes), codes)
        except MetraleError:
            if module not in self.added:
                raise
            kernel.set_params(by_size(codes), codes)
        return kernel

    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1:
        cdef cu.CUresult result = cu.CUDA_SUCCESS
        cdef int pushed = self.enter()
        if l.shared_bytes > kernel.shared_opted:
            result = cu.cuFuncSetAttribute(<cu.CUfunction>kernel.function,
                                           cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           <int>kernel.max_shared)
            if result == cu.CUDA_SUCCESS:
                kernel.shared_opted = kernel.max_shared
        if result == cu.CUDA_SUCCESS:
            with nogil:
                result = cu.cuLaunchKernel(
                    <cu.CUfunction>kernel.function, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2],
                    <unsigned int>l.shared_bytes, <cu.CUstream>stream, l.args, NULL)
        self.leave(pushed)
        if result != cu.CUDA_SUCCESS:
            check(result, f"launching {kernel.module}.{kernel.name} with grid {tuple(l.grid)}, "
                          f"block {tuple(l.block)}, {l.shared_bytes} bytes of shared memory")
        return 0

    # memory

    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0:
        cdef cu.CUdeviceptr ptr = 0
        cdef void* host = NULL
        cdef cu.CUresult result
        cdef bint pinned = kind == "pinned", managed = kind == "managed", pushed = self.enter()
        with nogil:
            if pinned:
                result = cu.cuMemAllocHost(&host, nbytes)
                ptr = <cu.CUdeviceptr>host
            elif managed:
                result = cu.cuMemAllocManaged(&ptr, nbytes, cu.CU_MEM_ATTACH_GLOBAL)
            else:
                result = cu.cuMemAlloc(&ptr, nbytes)
        self.leave(pushed)
        if result == cu.CUDA_ERROR_OUT_OF_MEMORY:
            return 0
        if result != cu.CUDA_SUCCESS:
            check(result, f"allocating {nbytes} bytes of {kind} memory")
        return ptr

    cdef int driver_free(self, uint64_t ptr, str kind) except -1:
        cdef cu.CUresult result
        cdef bint pinned = kind == "pinned", pushed = self.enter()
        with nogil:
            result = cu.cuMemFreeHost(<void*>ptr) if pinned else cu.cuMemFree(<cu.CUdeviceptr>ptr)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check(result, f"freeing {kind} memory at {ptr:#x}")

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
            check(result, "cuPointerGetAttributes")
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
        return check(result, "cuMemGetInfo")

    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuMemsetD8Async(<cu.CUdeviceptr>ptr, <unsigned char>value, nbytes, <cu.CUstream>stream)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check(result, f"setting {nbytes} bytes at {ptr:#x}")

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
        return 0 if result == cu.CUDA_SUCCESS else check(result, f"copying {nbytes} bytes from {src:#x} to {dst:#x}")

    # streams and events

    cdef uint64_t driver_create_stream(self) except 0:
        cdef cu.CUstream stream = NULL
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamCreate(&stream, cu.CU_STREAM_NON_BLOCKING)
        self.leave(pushed)
        check(result, "cuStreamCreate")
        return <uint64_t>stream

    cdef int driver_destroy_stream(self, uint64_t stream) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamDestroy(<cu.CUstream>stream)
        self.leave(pushed)
        return check(result, "cuStreamDestroy")

    cdef int driver_synchronize(self, uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuStreamSynchronize(<cu.CUstream>stream)
        self.leave(pushed)
        return check(result, "cuStreamSynchronize (an earlier launch may have failed)")

    cdef uint64_t driver_create_event(self, bint timing) except 0:
        cdef cu.CUevent event = NULL
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventCreate(
            &event, cu.CU_EVENT_DEFAULT if timing else cu.CU_EVENT_DISABLE_TIMING)
        self.leave(pushed)
        check(result, "cuEventCreate")
        return <uint64_t>event

    cdef int driver_destroy_event(self, uint64_t event) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventDestroy(<cu.CUevent>event)
        self.leave(pushed)
        return check(result, "cuEventDestroy")

    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventRecord(<cu.CUevent>event, <cu.CUstream>stream)
        self.leave(pushed)
        return check(result, "cuEventRecord")

    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamWaitEvent(<cu.CUstream>stream, <cu.CUevent>event, 0)
        self.leave(pushed)
        return check(result, "cuStreamWaitEvent")

    cdef int driver_event_query(self, uint64_t event) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventQuery(<cu.CUevent>event)
        self.leave(pushed)
        if result == cu.CUDA_ERROR_NOT_READY:
            return 0
        check(result, "cuEventQuery")
        return 1

    cdef int driver_event_synchronize(self, uint64_t event) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuEventSynchronize(<cu.CUevent>event)
        self.leave(pushed)
        return check(result, "cuEventSynchronize")

    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1:
        cdef float ms = 0
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuEventElapsedTime(&ms, <cu.CUevent>start, <cu.CUevent>end)
        self.leave(pushed)
        check(result, "cuEventElapsedTime (both events need timing=True and a record)")
        return ms

    cdef int driver_close(self) except -1:
        cdef cu.CUresult result
        cdef cu.CUcontext current = NULL
        cdef cu.CUmodule module
        cdef int pushed
        try:
            pushed = self.enter()
        except CudaError:      # a context that an earlier fault has ruined: its modules go with it
            self.modules.clear()
        else:
            for handle, _ in self.modules.values():
                module = <cu.CUmodule><uintptr_t>handle
                with nogil:
                    cu.cuModuleUnload(module)
            self.modules.clear()
            self.leave(pushed)
        cu.cuCtxGetCurrent(&current)
        if current == self.context and _thread.get_ident() in self.made_current:
            cu.cuCtxSetCurrent(NULL)
        self.context = NULL
        with nogil:
            result = cu.cuDevicePrimaryCtxRelease(self.device)
        return check(result, "cuDevicePrimaryCtxRelease")


cdef tuple by_size(list codes):
    """Parameters of which only the sizes are known."""
    return tuple([(f"argument {i + 1}", "any") for i in range(len(codes))])


def device_count():
    """The number of CUDA devices; 0 where there is no driver."""
    cdef int count = 0
    cdef cu.CUresult result
    try:
        result = cu.cuInit(0)
    except RuntimeError:      # cuda.bindings found no libcuda
        return 0
    if result in (cu.CUDA_ERROR_NO_DEVICE, cu.CUDA_ERROR_STUB_LIBRARY, cu.CUDA_ERROR_NOT_FOUND):
        return 0
    if result == cu.CUDA_ERROR_NOT_INITIALIZED:
        raise MetraleError("CUDA cannot start: this process was forked from one that uses it; start processes with "
                           "'spawn'")
    check(result, "cuInit")
    check(cu.cuDeviceGetCount(&count), "cuDeviceGetCount")
    return count


cdef int check(cu.CUresult result, str what) except -1:
    """Raise the CudaError for a result that is not success."""
    cdef const char* name = NULL
    if result == cu.CUDA_SUCCESS:
        return 0
    cu.cuGetErrorName(result, &name)
    raise CudaError(<int>result, name.decode() if name != NULL else "unknown error", what)
