# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launcher of the causal convolution update."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_ptr, push_u32
from metrale.ops.check cimport ceil_div, device_ptr, kernel_in, nullable_ptr, positive, refuse_number, u32

cdef enum:
    CHANNELS_A_BLOCK = 256
    WIDTH = 4


def conv1d_update_chunk2(GpuBackend gpu not None, KernelHandle kernel not None, conv_state, input, weight, output,
                         conv_state_intermediate, d_inner, d_conv, batch_size, stream, bias=0):
    """Two tokens of a depthwise causal convolution with SiLU, ``causal_conv1d.causal_conv1d_update_chunk2``.

    conv_state f32 ``[batch_size, d_inner, 4]``, oldest input first, updated in place; input and output bf16
    ``[batch_size, 2, d_inner]``; weight bf16 ``[d_inner, 4]``; conv_state_intermediate f32, shaped like conv_state,
    receives the window after the first token; bias f32 ``[d_inner]`` or null. Both states lie on 16-byte boundaries.
    Refuses ``d_conv`` other than 4, sizes of 0, null pointers. Argument order: the Rust launcher
    ``conv1d_update_chunk2``, ``bias`` added last.
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
    cdef Launch l
    kernel_in(kernel, b"causal_conv1d_update_chunk2")
    device_ptr(b"conv_state", conv_state, 16)
    device_ptr(b"input", input, 2)
    device_ptr(b"weight", weight, 2)
    device_ptr(b"output", output, 2)
    device_ptr(b"conv_state_intermediate", conv_state_intermediate, 16)
    nullable_ptr(b"bias", bias, 4)
    positive(b"d_inner", d_inner)
    positive(b"batch_size", batch_size)
    if d_conv != WIDTH:
        refuse_number(b"d_conv", d_conv, b"4", 0)
    launch_geometry(&l, ceil_div(d_inner, CHANNELS_A_BLOCK), batch_size, 1, CHANNELS_A_BLOCK, 1, 1, 0)
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
