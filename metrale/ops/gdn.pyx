# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of the gated delta rule over the tokens of a verify step.

All take query and key bf16, in rows of ``qk_stride`` elements a token that begin with ``[num_k_heads, k_dim]``; value
bf16, in rows of ``v_stride`` that begin with ``[num_v_heads, v_dim]``; gate and beta f32, in rows of ``gb_stride``
that begin with ``[num_v_heads]``; output is bf16 ``[batch_size, K, num_v_heads, v_dim]``. A state is ``[num_v_heads,
k_dim, v_dim]``, f32, or f16 for the kernels with ``_f16``; it is read and written fastest where it lies on a 16-byte
boundary and ``v_dim`` is a multiple of 4. A table is an address for each sequence, on the device.

All refuse ``k_dim`` that is not a multiple of 4 up to 128, ``v_dim`` outside 1 to 128, ``num_v_heads`` that is not a
multiple of ``num_k_heads``, sizes of 0, null pointers, and tables of more than ``VERIFY_WY_TABLE_SEQS`` sequences.
"""

from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_ptr, push_u32
from metrale.ops.check cimport (
    at_most, ceil_div, device_ptr, kernel_in, multiple, nullable_ptr, positive, refuse_number, u32,
)

cdef enum:
    WARP = 32
    WARP_COLUMNS = 16             # of a head's state
    WARPS = 4                     # a block
    NARROW_HEADS = 128            # of a batch: with fewer a block is one warp, so that there is one for every SM
    ROW_QUAD = 4
    MAX_DIM = 128
    MAX_TOKENS = 17

VERIFY_WY_TABLE_SEQS = TABLE_SEQS

# Lists by tokens: f32 and f16, of VERIFY and COMMIT then the same with tables.
cdef const char* WYN = (
    b"gated_delta_rule_wyn2 gated_delta_rule_wyn2_f16 gated_delta_rule_wyn3 gated_delta_rule_wyn3_f16 "
    b"gated_delta_rule_wyn4 gated_delta_rule_wyn4_f16 gated_delta_rule_wy5 gated_delta_rule_wy5_f16 "
    b"gated_delta_rule_wy6 gated_delta_rule_wy6_f16 gated_delta_rule_wy7 gated_delta_rule_wy7_f16 "
    b"gated_delta_rule_wy8 gated_delta_rule_wy8_f16 gated_delta_rule_wy9 gated_delta_rule_wy9_f16 "
    b"gated_delta_rule_wy10 gated_delta_rule_wy10_f16 gated_delta_rule_wy11 gated_delta_rule_wy11_f16 "
    b"gated_delta_rule_wy12 gated_delta_rule_wy12_f16 gated_delta_rule_wy13 gated_delta_rule_wy13_f16 "
    b"gated_delta_rule_wy14 gated_delta_rule_wy14_f16 gated_delta_rule_wy15 gated_delta_rule_wy15_f16 "
    b"gated_delta_rule_wy16 gated_delta_rule_wy16_f16 gated_delta_rule_wy17 gated_delta_rule_wy17_f16"
)
cdef const char* WYN_TABLE = (
    b"gated_delta_rule_wyn2_table gated_delta_rule_wyn2_f16_table gated_delta_rule_wyn3_table "
    b"gated_delta_rule_wyn3_f16_table gated_delta_rule_wyn4_table gated_delta_rule_wyn4_f16_table "
    b"gated_delta_rule_wy5_table gated_delta_rule_wy5_f16_table gated_delta_rule_wy6_table "
    b"gated_delta_rule_wy6_f16_table gated_delta_rule_wy7_table gated_delta_rule_wy7_f16_table "
    b"gated_delta_rule_wy8_table gated_delta_rule_wy8_f16_table gated_delta_rule_wy9_table "
    b"gated_delta_rule_wy9_f16_table gated_delta_rule_wy10_table gated_delta_rule_wy10_f16_table "
    b"gated_delta_rule_wy11_table gated_delta_rule_wy11_f16_table gated_delta_rule_wy12_table "
    b"gated_delta_rule_wy12_f16_table gated_delta_rule_wy13_table gated_delta_rule_wy13_f16_table "
    b"gated_delta_rule_wy14_table gated_delta_rule_wy14_f16_table gated_delta_rule_wy15_table "
    b"gated_delta_rule_wy15_f16_table gated_delta_rule_wy16_table gated_delta_rule_wy16_f16_table "
    b"gated_delta_rule_wy17_table gated_delta_rule_wy17_f16_table"
)
cdef const char* VERIFY = (
    b"gated_delta_rule_verify2 gated_delta_rule_verify2_f16 gated_delta_rule_verify2_table "
    b"gated_delta_rule_verify2_table_f16 gated_delta_rule_verify3 gated_delta_rule_verify3_f16 "
    b"gated_delta_rule_verify3_table gated_delta_rule_verify3_table_f16 gated_delta_rule_verify4 "
    b"gated_delta_rule_verify4_f16 gated_delta_rule_verify4_table gated_delta_rule_verify4_table_f16 "
    b"gated_delta_rule_verify5 gated_delta_rule_verify5_f16 gated_delta_rule_verify5_table "
    b"gated_delta_rule_verify5_table_f16 gated_delta_rule_verify6 gated_delta_rule_verify6_f16 "
    b"gated_delta_rule_verify6_table gated_delta_rule_verify6_table_f16 gated_delta_rule_verify7 "
    b"gated_delta_rule_verify7_f16 gated_delta_rule_verify7_table gated_delta_rule_verify7_table_f16 "
    b"gated_delta_rule_verify8 gated_delta_rule_verify8_f16 gated_delta_rule_verify8_table "
    b"gated_delta_rule_verify8_table_f16 gated_delta_rule_verify9 gated_delta_rule_verify9_f16 "
    b"gated_delta_rule_verify9_table gated_delta_rule_verify9_table_f16 gated_delta_rule_verify10 "
    b"gated_delta_rule_verify10_f16 gated_delta_rule_verify10_table gated_delta_rule_verify10_table_f16 "
    b"gated_delta_rule_verify11 gated_delta_rule_verify11_f16 gated_delta_rule_verify11_table "
    b"gated_delta_rule_verify11_table_f16 gated_delta_rule_verify12 gated_delta_rule_verify12_f16 "
    b"gated_delta_rule_verify12_table gated_delta_rule_verify12_table_f16 gated_delta_rule_verify13 "
    b"gated_delta_rule_verify13_f16 gated_delta_rule_verify13_table gated_delta_rule_verify13_table_f16 "
    b"gated_delta_rule_verify14 gated_delta_rule_verify14_f16 gated_delta_rule_verify14_table "
    b"gated_delta_rule_verify14_table_f16 gated_delta_rule_verify15 gated_delta_rule_verify15_f16 "
    b"gated_delta_rule_verify15_table gated_delta_rule_verify15_table_f16 gated_delta_rule_verify16 "
    b"gated_delta_rule_verify16_f16 gated_delta_rule_verify16_table gated_delta_rule_verify16_table_f16 "
    b"gated_delta_rule_verify17 gated_delta_rule_verify17_f16 gated_delta_rule_verify17_table "
    b"gated_delta_rule_verify17_table_f16"
)
cdef const char* WY2 = b"gated_delta_rule_wy2 gated_delta_rule_wy2_f16"
cdef const char* WY3 = b"gated_delta_rule_wy3 gated_delta_rule_wy3_f16"
cdef const char* WY4 = b"gated_delta_rule_wy4 gated_delta_rule_wy4_f16"
cdef const char* COMMIT = (
    b"gated_delta_rule_commit gated_delta_rule_commit_f16 "
    b"gated_delta_rule_commit_table gated_delta_rule_commit_table_f16"
)


def gdn_decode_wy2(GpuBackend gpu not None, KernelHandle kernel not None, h_state, query, key, value, gate, beta,
                   output, h_state_inter0, batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride,
                   gb_stride, state_is_table, stream):
    """Two tokens, ``gated_delta_rule_wy2`` or ``_f16``: h_state holds the state before and on return after both,
    h_state_inter0 the one after the first. With ``state_is_table`` they are tables; without, a ``batch_size`` other
    than 1 is refused.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t inter = as_ptr(h_state_inter0, "h_state_inter0", gpu, s)
    c_gdn_decode_wy(
        gpu, kernel, inputs_of(gpu, s, h_state, "h_state", query, key, value, gate, beta, output), &inter, 2,
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride),
        bool(state_is_table), s,
    )


def gdn_decode_wy3(GpuBackend gpu not None, KernelHandle kernel not None, h_state, query, key, value, gate, beta,
                   output, h_state_inter0, h_state_inter1, batch_size, num_k_heads, num_v_heads, k_dim, v_dim,
                   qk_stride, v_stride, gb_stride, state_is_table, stream):
    """``gdn_decode_wy2`` for three tokens, ``gated_delta_rule_wy3`` or ``_f16``."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t[2] inter
    inter[0] = as_ptr(h_state_inter0, "h_state_inter0", gpu, s)
    inter[1] = as_ptr(h_state_inter1, "h_state_inter1", gpu, s)
    c_gdn_decode_wy(
        gpu, kernel, inputs_of(gpu, s, h_state, "h_state", query, key, value, gate, beta, output), inter, 3,
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride),
        bool(state_is_table), s,
    )


def gdn_decode_wy4(GpuBackend gpu not None, KernelHandle kernel not None, h_state, query, key, value, gate, beta,
                   output, h_state_inter0, h_state_inter1, h_state_inter2, batch_size, num_k_heads, num_v_heads, k_dim,
                   v_dim, qk_stride, v_stride, gb_stride, state_is_table, stream):
    """``gdn_decode_wy2`` for four tokens, ``gated_delta_rule_wy4`` or ``_f16``. Argument order: the Rust launcher."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t[3] inter
    inter[0] = as_ptr(h_state_inter0, "h_state_inter0", gpu, s)
    inter[1] = as_ptr(h_state_inter1, "h_state_inter1", gpu, s)
    inter[2] = as_ptr(h_state_inter2, "h_state_inter2", gpu, s)
    c_gdn_decode_wy(
        gpu, kernel, inputs_of(gpu, s, h_state, "h_state", query, key, value, gate, beta, output), inter, 4,
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride),
        bool(state_is_table), s,
    )


cdef int c_gdn_decode_wy(GpuBackend gpu, KernelHandle kernel, GdnInputs x, const uint64_t* h_state_inter,
                         uint32_t tokens, GdnSizes sizes, bint state_is_table, uint64_t stream) except -1 nogil:
    cdef Launch l
    cdef const char* allowed = WY2 if tokens == 2 else WY3 if tokens == 3 else WY4
    cdef uint64_t alignment = state_alignment(state_is_table, kernel_in(kernel, allowed))
    cdef uint32_t i
    device_ptr(b"h_state", x.state, alignment)
    check_inputs(&x, &sizes)
    for i in range(tokens - 1):
        device_ptr(b"h_state_inter0" if i == 0 else b"h_state_inter1" if i == 1 else b"h_state_inter2",
                   h_state_inter[i], alignment)
    check_batch(sizes.batch_size, state_is_table)
    geometry(&l, &sizes)
    push_inputs(&l, &x)
    for i in range(tokens - 1):
        push_ptr(&l, h_state_inter[i])
    push_sizes(&l, &sizes)
    push_u32(&l, state_is_table)
    return launch(gpu, kernel, &l, stream)


def gdn_decode_wyn(GpuBackend gpu not None, KernelHandle kernel not None, h_state, query, key, value, gate, beta,
                   output, h_state_inter_base, inter_stride_floats, batch_size, num_k_heads, num_v_heads, k_dim, v_dim,
                   qk_stride, v_stride, gb_stride, stream):
    """K tokens of one sequence, ``gated_delta_rule_wy5`` to ``wy17``, ``wyn2`` to ``wyn4``, or their ``_f16``.

    h_state holds the state before and on return after all; the one after token t of the others is written to
    ``h_state_inter_base + t * inter_stride_floats``, in elements of the state. Refuses a ``batch_size`` other than 1.
    Argument order: the Rust launcher.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_gdn_decode_wyn(
        gpu, kernel, inputs_of(gpu, s, h_state, "h_state", query, key, value, gate, beta, output),
        as_ptr(h_state_inter_base, "h_state_inter_base", gpu, s), u32("inter_stride_floats", inter_stride_floats),
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride), s,
    )


cdef int c_gdn_decode_wyn(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t h_state_inter_base,
                          uint32_t inter_stride_floats, GdnSizes sizes, uint64_t stream) except -1 nogil:
    cdef uint64_t alignment = state_alignment(False, kernel_in(kernel, WYN))
    device_ptr(b"h_state", x.state, alignment)
    check_inputs(&x, &sizes)
    device_ptr(b"h_state_inter_base", h_state_inter_base, alignment)
    positive(b"inter_stride_floats", inter_stride_floats)
    check_batch(sizes.batch_size, False)
    return launch_wyn(gpu, kernel, &x, h_state_inter_base, inter_stride_floats, &sizes, stream)


def gdn_decode_wyn_table(GpuBackend gpu not None, KernelHandle kernel not None, h_tables, query, key, value, gate,
                         beta, output, hi_tables, slab_entry_stride, batch_size, num_k_heads, num_v_heads, k_dim,
                         v_dim, qk_stride, v_stride, gb_stride, stream):
    """``gdn_decode_wyn`` for several sequences, ``gated_delta_rule_wy5_table`` and so on, or ``_f16_table``.

    h_tables is a table of the states; hi_tables one for each other token, ``slab_entry_stride`` entries apart, which
    must be ``VERIFY_WY_TABLE_SEQS``. Argument order: the Rust launcher.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_gdn_decode_wyn_table(
        gpu, kernel, inputs_of(gpu, s, h_tables, "h_tables", query, key, value, gate, beta, output),
        as_ptr(hi_tables, "hi_tables", gpu, s), u32("slab_entry_stride", slab_entry_stride),
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride), s,
    )


cdef int c_gdn_decode_wyn_table(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t hi_tables,
                                uint32_t slab_entry_stride, GdnSizes sizes, uint64_t stream) except -1 nogil:
    kernel_in(kernel, WYN_TABLE)
    device_ptr(b"h_tables", x.state, 8)
    check_inputs(&x, &sizes)
    device_ptr(b"hi_tables", hi_tables, 8)
    if slab_entry_stride != TABLE_SEQS:
        refuse_number(b"slab_entry_stride", slab_entry_stride, b"", TABLE_SEQS)
    check_batch(sizes.batch_size, True)
    return launch_wyn(gpu, kernel, &x, hi_tables, slab_entry_stride, &sizes, stream)


def gated_delta_rule_verify(GpuBackend gpu not None, KernelHandle kernel not None, H, query, key, value, gate, beta,
                            output, corrections, batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride,
                            v_stride, gb_stride, stream, a_log=0, dt_bias=0, unit_rows=False):
    """K tokens, ``gated_delta_rule_verify2`` to ``17``, which leave H as it is: ``gated_delta_rule_commit`` applies
    those that are accepted, from corrections, f32 ``[batch_size, K, num_v_heads, v_dim]``.

    H is ``[batch_size]`` states, or for a kernel with ``_table`` a table. With a_log and dt_bias, f32
    ``[num_v_heads]``, gate and beta are raw: the decay is ``exp(-exp(a_log) * softplus(gate + dt_bias))``, and beta
    ``sigmoid(beta)``. With ``unit_rows`` query and key are divided by ``sqrt(sum(x^2) + 1e-6)``. Refuses one of a_log
    and dt_bias without the other.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_gated_delta_rule_verify(
        gpu, kernel, inputs_of(gpu, s, H, "H", query, key, value, gate, beta, output),
        as_ptr(corrections, "corrections", gpu, s),
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride),
        as_ptr(a_log, "a_log", gpu, s), as_ptr(dt_bias, "dt_bias", gpu, s), bool(unit_rows), s,
    )


cdef int c_gated_delta_rule_verify(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t corrections,
                                   GdnSizes sizes, uint64_t a_log, uint64_t dt_bias, bint unit_rows,
                                   uint64_t stream) except -1 nogil:
    cdef Launch l
    check_deferred(kernel_in(kernel, VERIFY), x.state, corrections, &sizes, a_log, dt_bias)
    check_inputs(&x, &sizes)
    geometry(&l, &sizes)
    push_inputs(&l, &x)
    push_ptr(&l, corrections)
    push_sizes(&l, &sizes)
    push_raw(&l, a_log, dt_bias, unit_rows)
    return launch(gpu, kernel, &l, stream)


def gated_delta_rule_commit(GpuBackend gpu not None, KernelHandle kernel not None, H, key, gate, corrections, accepted,
                            tokens, batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride,
                            stream, a_log=0, dt_bias=0, unit_rows=False):
    """The first ``accepted[b]`` tokens of each sequence onto H, ``gated_delta_rule_commit`` and its forms.

    The other arguments are those of the ``gated_delta_rule_verify`` that wrote corrections, of which ``tokens`` is
    the K, 1 to 17. accepted i32 ``[batch_size]``, on the device, 0 to ``tokens``; 0 leaves the state untouched. The
    state gets the bits that ``gdn_decode_wyn`` keeps after that token.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_gated_delta_rule_commit(
        gpu, kernel, as_ptr(H, "H", gpu, s), as_ptr(key, "key", gpu, s), as_ptr(gate, "gate", gpu, s),
        as_ptr(corrections, "corrections", gpu, s), as_ptr(accepted, "accepted", gpu, s), u32("tokens", tokens),
        sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride),
        as_ptr(a_log, "a_log", gpu, s), as_ptr(dt_bias, "dt_bias", gpu, s), bool(unit_rows), s,
    )


cdef int c_gated_delta_rule_commit(GpuBackend gpu, KernelHandle kernel, uint64_t H, uint64_t key, uint64_t gate,
                                   uint64_t corrections, uint64_t accepted, uint32_t tokens, GdnSizes sizes,
                                   uint64_t a_log, uint64_t dt_bias, bint unit_rows, uint64_t stream) except -1 nogil:
    cdef Launch l
    check_deferred(kernel_in(kernel, COMMIT), H, corrections, &sizes, a_log, dt_bias)
    device_ptr(b"key", key, 2)
    device_ptr(b"gate", gate, 4)
    device_ptr(b"accepted", accepted, 4)
    at_most(b"tokens", tokens, MAX_TOKENS)
    check_sizes(&sizes)
    geometry(&l, &sizes)
    push_ptr(&l, H)
    push_ptr(&l, key)
    push_ptr(&l, gate)
    push_ptr(&l, corrections)
    push_ptr(&l, accepted)
    push_u32(&l, tokens)
    push_sizes(&l, &sizes)
    push_raw(&l, a_log, dt_bias, unit_rows)
    return launch(gpu, kernel, &l, stream)


cdef GdnInputs inputs_of(GpuBackend gpu, uint64_t stream, state, str state_name, query, key, value, gate, beta,
                         output) except *:
    cdef GdnInputs x
    x.state = as_ptr(state, state_name, gpu, stream)
    x.query = as_ptr(query, "query", gpu, stream)
    x.key = as_ptr(key, "key", gpu, stream)
    x.value = as_ptr(value, "value", gpu, stream)
    x.gate = as_ptr(gate, "gate", gpu, stream)
    x.beta = as_ptr(beta, "beta", gpu, stream)
    x.output = as_ptr(output, "output", gpu, stream)
    return x


cdef GdnSizes sizes_of(batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride) except *:
    cdef GdnSizes sizes
    sizes.batch_size = u32("batch_size", batch_size)
    sizes.num_k_heads = u32("num_k_heads", num_k_heads)
    sizes.num_v_heads = u32("num_v_heads", num_v_heads)
    sizes.k_dim = u32("k_dim", k_dim)
    sizes.v_dim = u32("v_dim", v_dim)
    sizes.qk_stride = u32("qk_stride", qk_stride)
    sizes.v_stride = u32("v_stride", v_stride)
    sizes.gb_stride = u32("gb_stride", gb_stride)
    return sizes


cdef inline uint64_t state_alignment(bint is_table, int place) noexcept nogil:
    """Of a state, or of a table; the kernel's place in a list says which type: f32, f16, and so on."""
    return 8 if is_table else 2 if place % 2 else 4


cdef int check_inputs(const GdnInputs* x, const GdnSizes* sizes) except -1 nogil:
    device_ptr(b"query", x.query, 2)
    device_ptr(b"key", x.key, 2)
    device_ptr(b"value", x.value, 2)
    device_ptr(b"gate", x.gate, 4)
    device_ptr(b"beta", x.beta, 4)
    device_ptr(b"output", x.output, 2)
    return check_sizes(sizes)


cdef int check_sizes(const GdnSizes* sizes) except -1 nogil:
    positive(b"batch_size", sizes.batch_size)
    positive(b"num_k_heads", sizes.num_k_heads)
    multiple(b"num_v_heads", sizes.num_v_heads, sizes.num_k_heads)
    if sizes.k_dim - 1 >= MAX_DIM or sizes.k_dim % ROW_QUAD != 0:
        refuse_number(b"k_dim", sizes.k_dim, b"a multiple of 4, 4 to ", MAX_DIM)
    at_most(b"v_dim", sizes.v_dim, MAX_DIM)
    positive(b"qk_stride", sizes.qk_stride)
    positive(b"v_stride", sizes.v_stride)
    return positive(b"gb_stride", sizes.gb_stride)


cdef int check_batch(uint32_t batch_size, bint is_table) except -1 nogil:
    if is_table:
        return at_most(b"batch_size", batch_size, TABLE_SEQS)
    if batch_size != 1:      # the intermediates of a pool do not have h_state's stride
        refuse_number(b"batch_size", batch_size, b"1 for states without a table; for more stage pointer tables", 0)
    return 0


cdef int check_deferred(int place, uint64_t H, uint64_t corrections, const GdnSizes* sizes, uint64_t a_log,
                        uint64_t dt_bias) except -1 nogil:
    cdef bint is_table = place % 4 >= 2
    device_ptr(b"H", H, state_alignment(is_table, place))
    device_ptr(b"corrections", corrections, 4)
    nullable_ptr(b"a_log", a_log, 4)
    nullable_ptr(b"dt_bias", dt_bias, 4)
    if (a_log == 0) != (dt_bias == 0):
        with gil:
            refuse("dt_bias", dt_bias or None, "a device pointer with a_log, and null without")
    return at_most(b"batch_size", sizes.batch_size, TABLE_SEQS) if is_table else 0


cdef void geometry(Launch* l, const GdnSizes* sizes) noexcept nogil:
    cdef uint32_t warps = WARPS
    if <uint64_t>sizes.batch_size * sizes.num_v_heads < NARROW_HEADS:
        warps = 1
    launch_geometry(l, ceil_div(sizes.v_dim, warps * WARP_COLUMNS), sizes.num_v_heads, sizes.batch_size,
                    warps * WARP, 1, 1, 0)


cdef int launch_wyn(GpuBackend gpu, KernelHandle kernel, const GdnInputs* x, uint64_t inter, uint32_t stride,
                    const GdnSizes* sizes, uint64_t stream) except -1 nogil:
    cdef Launch l
    geometry(&l, sizes)
    push_inputs(&l, x)
    push_ptr(&l, inter)
    push_u32(&l, stride)
    push_sizes(&l, sizes)
    return launch(gpu, kernel, &l, stream)


cdef void push_inputs(Launch* l, const GdnInputs* x) noexcept nogil:
    push_ptr(l, x.state)
    push_ptr(l, x.query)
    push_ptr(l, x.key)
    push_ptr(l, x.value)
    push_ptr(l, x.gate)
    push_ptr(l, x.beta)
    push_ptr(l, x.output)


cdef void push_sizes(Launch* l, const GdnSizes* sizes) noexcept nogil:
    push_u32(l, sizes.batch_size)
    push_u32(l, sizes.num_k_heads)
    push_u32(l, sizes.num_v_heads)
    push_u32(l, sizes.k_dim)
    push_u32(l, sizes.v_dim)
    push_u32(l, sizes.qk_stride)
    push_u32(l, sizes.v_stride)
    push_u32(l, sizes.gb_stride)


cdef void push_raw(Launch* l, uint64_t a_log, uint64_t dt_bias, bint unit_rows) noexcept nogil:
    push_ptr(l, a_log)
    push_ptr(l, dt_bias)
    push_u32(l, unit_rows)
