# SPDX-License-Identifier: MIT OR Apache-2.0
"""CudaBackend: kernels, launches and graphs through ``cuda.bindings.cydriver``."""

from pathlib import Path

from cuda.bindings cimport cydriver as cu
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from metrale.errors import CaptureError, CudaError, LaunchError, MetraleError, refuse
from metrale.gpu import cubin, signatures, sources

from metrale.gpu.atomic cimport atomic_add, atomic_read
from metrale.gpu.context cimport CudaContext, check_result
from metrale.gpu.driver cimport (
    CAPTURE_INVALIDATED, CAPTURE_NONE, LAUNCH_CLUSTER, LAUNCH_COOPERATIVE, LAUNCH_OVERLAP_PREVIOUS, CaptureStatus,
    Launch,
)
from metrale.gpu.interop cimport as_handle
from metrale.gpu.kernel cimport KIND_ANY, MAX_PARAMS, KernelHandle, param_code

cdef enum:
    DRIVER_API = 12000             # the CUDA version whose cuLaunchKernel is called
    DEFAULT_SHARED = 48 * 1024     # shared bytes a block may have without opting in
    PORTABLE_CLUSTER = 8           # blocks of a cluster that every device with clusters takes
    MAX_ATTRIBUTES = 3             # of a launch: one a flag

# The driver's own cuLaunchKernel: what stands before it in cydriver costs a tenth of what a launch may add to it.
cdef cu.CUresult (*launch_kernel)(
    cu.CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
    cu.CUstream, void**, void**) noexcept nogil

_CAPTURE_ERRORS = {
    cu.CUDA_ERROR_STREAM_CAPTURE_UNJOINED: "a stream that joined it was not joined back, ",
    cu.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: "a call that cannot be captured ended it, ",
}


cdef class CudaBackend(CudaContext):
    """One CUDA device, through its primary context, which torch and CuPy share.

    The default stream is the backend's own and, like all its streams, does not wait for the legacy stream; stream
    0 means the legacy stream. Errors: ``CudaError`` with the driver's name and number.
    """

    cdef dict modules             # module -> (CUmodule, {kernel: params} or None where only sizes are known)
    cdef set added                # modules of add_module

    def __init__(self, device=0, check=False, redzone=False):
        self.starting(check, redzone)
        count = device_count()
        if as_handle(device, "device") >= count:
            refuse("device", device, f"0 to {count - 1}" if count else "nothing: there is no CUDA device")
        self.modules = {}
        self.added = set()
        check_result(cu.cuGetProcAddress(b"cuLaunchKernel", <void**>&launch_kernel, DRIVER_API, 0, NULL),
                     "cuGetProcAddress")
        self.retain(device)
        try:
            self.opened()
        except BaseException:
            self.driver_destroy_stream(self.stream0)
            CudaContext.driver_close(self)
            raise

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
        cdef cu.CUstreamCaptureMode mode
        cdef int pushed = self.enter_freely(&mode)
        cdef size_t before = self.used()
        with nogil:
            result = cu.cuModuleLoadData(&handle, data)
        self.modules_took += self.grown(before)
        self.leave_freely(pushed, &mode)
        check_result(result, f"loading kernel module {path.stem}")
        self.modules[path.stem] = (<uintptr_t>handle, declared)
        self.ledger.add_handle(<uint64_t>handle, "module", path.stem, len(image))
        return 0

    cdef KernelHandle driver_kernel(self, str module, str name):
        cdef KernelHandle kernel = self.new_kernel(module, name)
        cdef cu.CUfunction function = NULL
        cdef cu.CUresult result
        cdef size_t offset = 0, size = 0, before
        cdef int value = 0
        if not self.has_module(module):
            raise sources.not_found(module, None, {**sources.signatures(), **dict.fromkeys(self.added, ())})
        if module not in self.modules:
            self.load(sources.source_path(module))
        handle, declared = self.modules[module]
        # A kernel made by a macro is not among the declared: then only its parameters' sizes are known.
        params = (declared or {}).get(name)
        cdef int pushed = self.enter()
        before = self.used()
        try:
            result = cu.cuModuleGetFunction(&function, <cu.CUmodule><uintptr_t>handle, name.encode())
            if result == cu.CUDA_ERROR_NOT_FOUND:
                raise sources.not_found(module, name, {module: declared or ()})
            check_result(result, f"looking up kernel {module}.{name}")
            # One index too many is an error to tools that watch the driver. The package's own sources are known to
            # declare what is there; what a user's seems to declare is held against all that the binary has.
            limit = MAX_PARAMS + 1 if params is None or module in self.added else len(params)
            codes = []
            while len(codes) < limit and (
                    cu.cuFuncGetParamInfo(function, len(codes), &offset, &size) == cu.CUDA_SUCCESS):
                codes.append(param_code(KIND_ANY, <uint32_t>size))
            check_result(cu.cuFuncGetAttribute(&value, cu.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function), name)
            kernel.max_threads = value
            check_result(cu.cuFuncGetAttribute(&value, cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), name)
        finally:
            self.modules_took += self.grown(before)
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

    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
        cdef cu.CUresult result = cu.CUDA_ERROR_INVALID_CONTEXT
        atomic_add(&self.in_flight, 1)
        if not atomic_read(<int*>&self.closed) and l.shared_bytes <= kernel.shared_opted:
            result = launch(kernel, l, stream)
        atomic_add(&self.in_flight, -1)
        return 0 if result == cu.CUDA_SUCCESS else self.launch_again(kernel, l, stream, result)

    cdef int launch_again(self, KernelHandle kernel, Launch* l, uint64_t stream, cu.CUresult result) except -1 nogil:
        """What a launch needs the first time in a thread or of a kernel: the context, and its shared memory. The driver
        says what is missing; asking it before each launch would cost more than the launch has to spare."""
        cdef cu.CUcontext current = NULL
        cu.cuCtxGetCurrent(&current)
        # This result is also that of a launch that was not tried, and another thread may have opted in since.
        cdef bint final = current == self.context and result != cu.CUDA_ERROR_INVALID_CONTEXT
        cdef int pushed = self.enter()
        if not final:
            result = opt_in(kernel) if l.shared_bytes > kernel.shared_opted else cu.CUDA_SUCCESS
            if result == cu.CUDA_SUCCESS:
                result = launch(kernel, l, stream)
        self.leave(pushed)
        if result != cu.CUDA_SUCCESS:
            with gil:
                check_result(result, f"launching {kernel.module}.{kernel.name} with grid {tuple(l.grid)}, "
                                     f"block {tuple(l.block)}, {l.shared_bytes} bytes of shared memory")
        return 0

    cdef int driver_check_special(self, KernelHandle kernel, Launch* l) except -1:
        cdef cu.CUlaunchAttribute attributes[MAX_ATTRIBUTES]
        cdef cu.CUlaunchConfig config
        cdef cu.CUfunction function = <cu.CUfunction>kernel.function
        cdef cu.CUresult result = cu.CUDA_SUCCESS
        cdef int pushed, at_once = 0, largest = 0
        cdef uint64_t blocks = <uint64_t>l.grid[0] * l.grid[1] * l.grid[2]
        cdef uint64_t cluster = <uint64_t>l.cluster[0] * l.cluster[1] * l.cluster[2] if l.flags & LAUNCH_CLUSTER else 1
        where = f"{kernel.module}.{kernel.name}"
        for flag, what in ((LAUNCH_CLUSTER, "cluster"), (LAUNCH_OVERLAP_PREVIOUS, "overlap_previous")):
            if l.flags & flag and self.compute_capability < (9, 0):
                raise LaunchError(f"{where}: {what}: needs compute capability 9.0, and {self.name} has "
                                  f"{'.'.join(map(str, self.compute_capability))}")
        if l.flags & LAUNCH_CLUSTER:
            self.check_compiled_cluster(kernel, l)
        fill_config(kernel, l, NULL, &config, attributes)
        pushed = self.enter()
        if l.shared_bytes > kernel.shared_opted:
            result = opt_in(kernel)
        if result == cu.CUDA_SUCCESS and cluster > PORTABLE_CLUSTER:
            result = cu.cuFuncSetAttribute(function, cu.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if result == cu.CUDA_SUCCESS and l.flags & LAUNCH_CLUSTER:
            result = cu.cuOccupancyMaxPotentialClusterSize(&largest, function, &config)
        if result == cu.CUDA_SUCCESS and l.flags & LAUNCH_COOPERATIVE and cluster <= <uint64_t>max(largest, 1):
            if l.flags & LAUNCH_CLUSTER:
                result = cu.cuOccupancyMaxActiveClusters(&at_once, function, &config)
                at_once *= <int>cluster
            else:
                result = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &at_once, function, <int>(l.block[0] * l.block[1] * l.block[2]), l.shared_bytes)
                at_once *= self.sm_count
        self.leave(pushed)
        check_result(result, f"asking what {where} can be launched with")
        if l.flags & LAUNCH_CLUSTER and cluster > <uint64_t>largest:
            raise LaunchError(f"{where}: cluster: got {tuple(l.cluster)}, allowed: 1 to {largest} blocks with this "
                              "block and shared memory")
        if l.flags & LAUNCH_COOPERATIVE and blocks > <uint64_t>at_once:
            raise LaunchError(f"{where}: grid: got {tuple(l.grid)}, allowed: {at_once} blocks in a cooperative "
                              "launch with this block and shared memory, all at once on the device")
        return 0

    cdef int check_compiled_cluster(self, KernelHandle kernel, Launch* l) except -1:
        """A cluster that a kernel was compiled with cannot be another in a launch."""
        cdef int dims[3]      # zeros for a kernel that was compiled without
        cdef int pushed = self.enter()
        try:
            for i, which in enumerate((cu.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                                       cu.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                                       cu.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH)):
                check_result(cu.cuFuncGetAttribute(&dims[i], which, <cu.CUfunction>kernel.function), kernel.name)
        finally:
            self.leave(pushed)
        if dims[0] > 0 and tuple(dims) != tuple(l.cluster):
            raise LaunchError(f"{kernel.module}.{kernel.name}: cluster: got {tuple(l.cluster)}, allowed: "
                              f"{tuple(dims)}, which the kernel was compiled with")
        return 0

    # graphs

    cdef int driver_begin_capture(self, uint64_t stream) except -1:
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamBeginCapture(<cu.CUstream>stream, cu.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        self.leave(pushed)
        return check_result(result, "cuStreamBeginCapture")

    cdef CaptureStatus driver_capture_status(self, uint64_t stream, uint64_t* id,
                                             uint64_t* node) except? CAPTURE_INVALIDATED:
        cdef cu.CUstreamCaptureStatus status = cu.CU_STREAM_CAPTURE_STATUS_NONE
        cdef cu.cuuint64_t capture = 0
        cdef cu.CUgraph graph = NULL
        cdef const cu.CUgraphNode* nodes = NULL
        cdef const cu.CUgraphEdgeData* edges = NULL
        cdef size_t count = 0
        cdef int pushed = self.enter()
        cdef cu.CUresult result
        if id == NULL and node == NULL:
            result = cu.cuStreamIsCapturing(<cu.CUstream>stream, &status)
        else:
            result = cu.cuStreamGetCaptureInfo(<cu.CUstream>stream, &status, &capture, &graph, &nodes, &edges, &count)
        self.leave(pushed)
        if result == cu.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:      # the legacy stream, while another one is captured
            return CAPTURE_NONE
        check_result(result, "asking whether a stream is being captured")
        if id != NULL:
            id[0] = capture
        if node != NULL:
            node[0] = <uint64_t>nodes[0] if count == 1 else 0
        return <CaptureStatus><int>status

    cdef uint64_t driver_end_capture(self, uint64_t stream) except 0:
        cdef cu.CUgraph graph = NULL
        cdef const char* name = NULL
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuStreamEndCapture(<cu.CUstream>stream, &graph)
        self.leave(pushed)
        if result != cu.CUDA_SUCCESS or graph == NULL:
            cu.cuGetErrorName(result, &name)
            raise CaptureError(f"the capture of the stream {stream:#x} made no graph: {_CAPTURE_ERRORS.get(result, '')}"
                               f"{name.decode() if name != NULL else 'unknown error'} ({<int>result})")
        return <uint64_t>graph

    cdef uint64_t driver_instantiate(self, uint64_t graph) except 0:
        cdef cu.CUgraphExec executable = NULL
        cdef cu.CUresult result
        cdef cu.CUstreamCaptureMode mode
        cdef int pushed = self.enter_freely(&mode)
        with nogil:
            result = cu.cuGraphInstantiate(&executable, <cu.CUgraph>graph, 0)
        self.leave_freely(pushed, &mode)
        check_result(result, "cuGraphInstantiate")
        return <uint64_t>executable

    cdef int driver_destroy_graph(self, uint64_t graph, uint64_t executable) except -1:
        cdef cu.CUresult result = cu.CUDA_SUCCESS, second = cu.CUDA_SUCCESS
        cdef cu.CUstreamCaptureMode mode
        cdef int pushed = self.enter_freely(&mode)
        if executable != 0:
            result = cu.cuGraphExecDestroy(<cu.CUgraphExec>executable)
        if graph != 0:
            second = cu.cuGraphDestroy(<cu.CUgraph>graph)
        self.leave_freely(pushed, &mode)
        check_result(result, "cuGraphExecDestroy")
        return check_result(second, "cuGraphDestroy")

    cdef int driver_launch_graph(self, uint64_t executable, uint64_t stream) except -1:
        cdef cu.CUresult result
        cdef int pushed = self.enter()
        with nogil:
            result = cu.cuGraphLaunch(<cu.CUgraphExec>executable, <cu.CUstream>stream)
        self.leave(pushed)
        return 0 if result == cu.CUDA_SUCCESS else check_result(result, f"launching the graph {executable:#x}")

    cdef int driver_update_node(self, uint64_t executable, uint64_t node, KernelHandle kernel, Launch* l) except -1:
        cdef cu.CUDA_KERNEL_NODE_PARAMS params
        memset(&params, 0, sizeof(params))
        params.func = <cu.CUfunction>kernel.function
        params.gridDimX, params.gridDimY, params.gridDimZ = l.grid[0], l.grid[1], l.grid[2]
        params.blockDimX, params.blockDimY, params.blockDimZ = l.block[0], l.block[1], l.block[2]
        params.sharedMemBytes = <unsigned int>l.shared_bytes
        params.kernelParams = l.args
        cdef int pushed = self.enter()
        cdef cu.CUresult result = cu.cuGraphExecKernelNodeSetParams(
            <cu.CUgraphExec>executable, <cu.CUgraphNode>node, &params)
        self.leave(pushed)
        return check_result(result, f"updating {kernel.module}.{kernel.name} in the graph {executable:#x}")

    cdef int driver_close(self) except -1:
        cdef cu.CUmodule module
        cdef int pushed
        try:
            pushed = self.enter()
        except CudaError:      # a context that an earlier fault has ruined: its modules go with it
            pass
        else:
            for handle, _ in self.modules.values():
                module = <cu.CUmodule><uintptr_t>handle
                with nogil:
                    cu.cuModuleUnload(module)
            self.leave(pushed)
        self.modules.clear()
        return CudaContext.driver_close(self)


cdef cu.CUresult opt_in(KernelHandle kernel) noexcept nogil:
    """Let the kernel have all the dynamic shared memory that the device gives a block."""
    cdef cu.CUresult result = cu.cuFuncSetAttribute(
        <cu.CUfunction>kernel.function, cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, <int>kernel.max_shared)
    if result == cu.CUDA_SUCCESS:
        kernel.shared_opted = kernel.max_shared
    return result


cdef void fill_config(KernelHandle kernel, Launch* l, cu.CUstream stream, cu.CUlaunchConfig* config,
                      cu.CUlaunchAttribute* attributes) noexcept nogil:
    """``config``, with its attributes in ``attributes``, for a launch with flags."""
    cdef unsigned int n = 0
    config.gridDimX, config.gridDimY, config.gridDimZ = l.grid[0], l.grid[1], l.grid[2]
    config.blockDimX, config.blockDimY, config.blockDimZ = l.block[0], l.block[1], l.block[2]
    config.sharedMemBytes = <unsigned int>l.shared_bytes
    config.hStream = stream
    config.attrs = attributes
    if l.flags & LAUNCH_CLUSTER:
        attributes[n].id = cu.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attributes[n].value.clusterDim.x = l.cluster[0]
        attributes[n].value.clusterDim.y = l.cluster[1]
        attributes[n].value.clusterDim.z = l.cluster[2]
        n += 1
    if l.flags & LAUNCH_COOPERATIVE:
        attributes[n].id = cu.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[n].value.cooperative = 1
        n += 1
    if l.flags & LAUNCH_OVERLAP_PREVIOUS:
        attributes[n].id = cu.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[n].value.programmaticStreamSerializationAllowed = 1
        n += 1
    config.numAttrs = n


cdef inline cu.CUresult launch(KernelHandle kernel, Launch* l, uint64_t stream) noexcept nogil:
    if l.flags != 0:
        return launch_special(kernel, l, stream)
    return launch_kernel(<cu.CUfunction>kernel.function, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1],
                         l.block[2], <unsigned int>l.shared_bytes, <cu.CUstream>stream, l.args, NULL)


cdef cu.CUresult launch_special(KernelHandle kernel, Launch* l, uint64_t stream) noexcept nogil:
    cdef cu.CUlaunchAttribute attributes[MAX_ATTRIBUTES]
    cdef cu.CUlaunchConfig config
    fill_config(kernel, l, <cu.CUstream>stream, &config, attributes)
    return cu.cuLaunchKernelEx(&config, <cu.CUfunction>kernel.function, l.args, NULL)


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
    check_result(result, "cuInit")
    check_result(cu.cuDeviceGetCount(&count), "cuDeviceGetCount")
    return count
