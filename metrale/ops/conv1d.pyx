# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of the causal convolution of width 4.

In all a window is f32 ``[d_inner, 4]``, oldest input first, on a 16-byte boundary; input and output are bf16
``[batch_size, K, d_inner]``, weight bf16 ``[d_inner, 4]``, bias f32 ``[d_inner]`` or null. A table is an address for
each sequence, on the device. All refuse ``d_conv`` other than 4, sizes of 0, null pointers, and tables of more than 32
sequences.
"""

from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_ptr, push_u32
from metrale.ops.check cimport (
    at_most, ceil_div, device_ptr, kernel_in, nullable_ptr, positive, refuse_number, u32,
)

cdef enum:
    CHANNELS_A_BLOCK = 256
    WIDTH = 4
    TABLE_SEQS = 32
    MAX_TOKENS = 17

# Without tables, then with.
cdef const char* CHUNKS = (
    b"causal_conv1d_update_chunk1 causal_conv1d_update_chunk1_table "
    b"causal_conv1d_update_chunk2 causal_conv1d_update_chunk2_table "
    b"causal_conv1d_update_chunk3 causal_conv1d_update_chunk3_table "
    b"causal_conv1d_update_chunk4 causal_conv1d_update_chunk4_table "
    b"causal_conv1d_update_chunk5 causal_conv1d_update_chunk5_table "
    b"causal_conv1d_update_chunk6 causal_conv1d_update_chunk6_table "
    b"causal_conv1d_update_chunk7 causal_conv1d_update_chunk7_table "
    b"causal_conv1d_update_chunk8 causal_conv1d_update_chunk8_table "
    b"causal_conv1d_update_chunk9 causal_conv1d_update_chunk9_table "
    b"causal_conv1d_update_chunk10 causal_conv1d_update_chunk10_table "
    b"causal_conv1d_update_chunk11 causal_conv1d_update_chunk11_table "
    b"causal_conv1d_update_chunk12 causal_conv1d_update_chunk12_table "
    b"causal_conv1d_update_chunk13 causal_conv1d_update_chunk13_table "
    b"causal_conv1d_update_chunk14 causal_conv1d_update_chunk14_table "
    b"causal_conv1d_update_chunk15 causal_conv1d_update_chunk15_table "
    b"causal_conv1d_update_chunk16 causal_conv1d_update_chunk16_table "
    b"causal_conv1d_update_chunk17 causal_conv1d_update_chunk17_table"
)
cdef const char* VERIFY = b"causal_conv1d_verify causal_conv1d_verify_table"
cdef const char* COMMIT = b"causal_conv1d_commit causal_conv1d_commit_table"


def conv1d_update_chunk2(GpuBackend gpu not None, KernelHandle kernel not None, conv_state, input, weight, output,
                         conv_state_intermediate, d_inner, d_conv, batch_size, stream, bias=0):
    """Two tokens of a depthwise causal convolution with SiLU, ``causal_conv1d.causal_conv1d_update_chunk2``.

    conv_state, ``batch_size`` windows, is updated in place; conv_state_intermediate receives those after the first
    token. Argument order: the Rust launcher ``conv1d_update_chunk2``, ``bias`` added last.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t conv_state_ = as_ptr(conv_state, "conv_state", gpu, s), input_ = as_ptr(input, "input", gpu, s)
    cdef uint64_t weight_ = as_ptr(weight, "weight", gpu, s), output_ = as_ptr(output, "output", gpu, s)
    cdef uint64_t conv_state_intermediate_ = as_ptr(conv_state_intermediate, "conv_state_intermediate", gpu, s)
    cdef uint64_t bias_ = as_ptr(bias, "bias", gpu, s)
    cdef uint32_t d_inner_ = u32("d_inner", d_inner), d_conv_ = u32("d_conv", d_conv)
    cdef uint32_t batch_size_ = u32("batch_size", batch_size)
    with nogil:
        c_conv1d_update_chunk2(gpu, kernel, conv_state_, input_, weight_, output_, conv_state_intermediate_, d_inner_,
                               d_conv_, batch_size_, s, bias_)


cdef int c_conv1d_update_chunk2(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input,
                                uint64_t weight, uint64_t output, uint64_t conv_state_intermediate, uint32_t d_inner,
                                uint32_t d_conv, uint32_t batch_size, uint64_t stream, uint64_t bias) except -1 nogil:
    kernel_in(kernel, b"causal_conv1d_update_chunk2")
    device_ptr(b"conv_state_intermediate", conv_state_intermediate, 16)
    return launch_update(gpu, kernel, False, conv_state, input, weight, output, conv_state_intermediate, d_inner,
                         d_conv, batch_size, stream, bias)


def conv1d_update_chunkn(GpuBackend gpu not None, KernelHandle kernel not None, conv_state, input, weight, output,
                         conv_state_intermediate, d_inner, d_conv, batch_size, stream, bias=0):
    """``conv1d_update_chunk2`` for K tokens, ``causal_conv1d_update_chunk1`` to ``chunk17`` or their ``_table``.

    conv_state_intermediate is ``[K - 1, batch_size]`` windows, or with ``_table`` a table for each token but the last,
    32 entries apart, as conv_state is one. For one token it is not read and may be null.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_conv1d_update_chunkn(
        gpu, kernel, as_ptr(conv_state, "conv_state", gpu, s), as_ptr(input, "input", gpu, s),
        as_ptr(weight, "weight", gpu, s), as_ptr(output, "output", gpu, s),
        as_ptr(conv_state_intermediate, "conv_state_intermediate", gpu, s), u32("d_inner", d_inner),
        u32("d_conv", d_conv), u32("batch_size", batch_size), s, as_ptr(bias, "bias", gpu, s),
    )


cdef int c_conv1d_update_chunkn(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input,
                                uint64_t weight, uint64_t output, uint64_t conv_state_intermediate, uint32_t d_inner,
                                uint32_t d_conv, uint32_t batch_size, uint64_t stream, uint64_t bias) except -1 nogil:
    cdef int place = kernel_in(kernel, CHUNKS)
    cdef bint is_table = place % 2
    if place < 2:
        nullable_ptr(b"conv_state_intermediate", conv_state_intermediate, state_alignment(is_table))
    else:
        device_ptr(b"conv_state_intermediate", conv_state_intermediate, state_alignment(is_table))
    return launch_update(gpu, kernel, is_table, conv_state, input, weight, output, conv_state_intermediate, d_inner,
                         d_conv, batch_size, stream, bias)


def conv1d_verify(GpuBackend gpu not None, KernelHandle kernel not None, conv_state, input, weight, output, tokens,
                  d_inner, d_conv, batch_size, stream, bias=0):
    """``tokens`` tokens, 1 to 17, which leave conv_state as it is, ``causal_conv1d_verify`` or ``_table``.

    ``conv1d_commit`` applies those that are accepted, from the same input.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_conv1d_verify(
        gpu, kernel, as_ptr(conv_state, "conv_state", gpu, s), as_ptr(input, "input", gpu, s),
        as_ptr(weight, "weight", gpu, s), as_ptr(output, "output", gpu, s), u32("tokens", tokens),
        u32("d_inner", d_inner), u32("d_conv", d_conv), u32("batch_size", batch_size), s,
        as_ptr(bias, "bias", gpu, s),
    )


cdef int c_conv1d_verify(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input, uint64_t weight,
                         uint64_t output, uint32_t tokens, uint32_t d_inner, uint32_t d_conv, uint32_t batch_size,
                         uint64_t stream, uint64_t bias) except -1 nogil:
    cdef Launch l
    check(kernel_in(kernel, VERIFY), conv_state, input, d_inner, d_conv, batch_size)
    check_outputs(weight, output, bias)
    at_most(b"tokens", tokens, MAX_TOKENS)
    geometry(&l, d_inner, batch_size)
    push_ptr(&l, conv_state)
    push_ptr(&l, input)
    push_ptr(&l, weight)
    push_ptr(&l, bias)
    push_ptr(&l, output)
    push_u32(&l, tokens)
    push_u32(&l, batch_size)
    push_u32(&l, d_inner)
    push_u32(&l, d_conv)
    return launch(gpu, kernel, &l, stream)


def conv1d_commit(GpuBackend gpu not None, KernelHandle kernel not None, conv_state, input, accepted, tokens, d_inner,
                  d_conv, batch_size, stream):
    """The first ``accepted[b]`` inputs of each sequence onto conv_state, ``causal_conv1d_commit`` or ``_table``.

    accepted i32 ``[batch_size]``, on the device, 0 to ``tokens``; 0 leaves the window untouched.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_conv1d_commit(
        gpu, kernel, as_ptr(conv_state, "conv_state", gpu, s), as_ptr(input, "input", gpu, s),
        as_ptr(accepted, "accepted", gpu, s), u32("tokens", tokens), u32("d_inner", d_inner), u32("d_conv", d_conv),
        u32("batch_size", batch_size), s,
    )


cdef int c_conv1d_commit(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input, uint64_t accepted,
                         uint32_t tokens, uint32_t d_inner, uint32_t d_conv, uint32_t batch_size,
                         uint64_t stream) except -1 nogil:
    cdef Launch l
    check(kernel_in(kernel, COMMIT), conv_state, input, d_inner, d_conv, batch_size)
    device_ptr(b"accepted", accepted, 4)
    at_most(b"tokens", tokens, MAX_TOKENS)
    geometry(&l, d_inner, batch_size)
    push_ptr(&l, conv_state)
    push_ptr(&l, input)
    push_ptr(&l, accepted)
    push_u32(&l, tokens)
    push_u32(&l, batch_size)
    push_u32(&l, d_inner)
    return launch(gpu, kernel, &l, stream)


cdef inline uint64_t state_alignment(bint is_table) noexcept nogil:
    return 8 if is_table else 16


cdef int check(bint is_table, uint64_t conv_state, uint64_t input, uint32_t d_inner, uint32_t d_conv,
               uint32_t batch_size) except -1 nogil:
    device_ptr(b"conv_state", conv_state, state_alignment(is_table))
    device_ptr(b"input", input, 2)
    positive(b"d_inner", d_inner)
    positive(b"batch_size", batch_size)
    if d_conv != WIDTH:
        refuse_number(b"d_conv", d_conv, b"4", 0)
    return at_most(b"batch_size", batch_size, TABLE_SEQS) if is_table else 0


cdef int check_outputs(uint64_t weight, uint64_t output, uint64_t bias) except -1 nogil:
    device_ptr(b"weight", weight, 2)
    device_ptr(b"output", output, 2)
    return nullable_ptr(b"bias", bias, 4)


cdef int launch_update(GpuBackend gpu, KernelHandle kernel, bint is_table, uint64_t conv_state, uint64_t input,
                       uint64_t weight, uint64_t output, uint64_t conv_state_intermediate, uint32_t d_inner,
                       uint32_t d_conv, uint32_t batch_size, uint64_t stream, uint64_t bias) except -1 nogil:
    cdef Launch l
    check(is_table, conv_state, input, d_inner, d_conv, batch_size)
    check_outputs(weight, output, bias)
    geometry(&l, d_inner, batch_size)
    push_ptr(&l, conv_state)
    push_ptr(&l, input)
    push_ptr(&l, weight)
    push_ptr(&l, bias)
    push_ptr(&l, output)
    push_ptr(&l, conv_state_intermediate)
    push_u32(&l, batch_size)
    push_u32(&l, d_inner)
    push_u32(&l, d_conv)
    return launch(gpu, kernel, &l, stream)


cdef void geometry(Launch* l, uint32_t d_inner, uint32_t batch_size) noexcept nogil:
    launch_geometry(l, ceil_div(d_inner, CHANNELS_A_BLOCK), batch_size, 1, CHANNELS_A_BLOCK, 1, 1, 0)
