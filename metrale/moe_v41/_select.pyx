# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert selection on the host, from the header that the device kernel compiles too: the same bits."""

import numpy as np

from libc.stdint cimport int32_t, uint32_t

cdef extern from "common/route.cuh" namespace "metrale" nogil:
    uint32_t route_select_host(const float* logits, const float* bias, uint32_t n_routed, uint32_t topk,
                               float gate_temp, float route_scale, uint32_t norm_topk, int32_t* picks, float* weights)


def route_select(const float[::1] logits not None, const float[::1] bias not None, uint32_t topk, float gate_temp,
                 float route_scale, bint norm_topk):
    """Select one token's experts.

    logits, bias: f32 ``[n_routed]`` of the same length, at most 1024; topk at most 32 and at most n_routed, as
    ``MoeV41Cfg`` has checked. Returns ``(flags, picks i32 [topk], weights f32 [topk])``, best pick first; flags is 2
    and picks are -1 where a logit or a bias is not finite.
    """
    picks = np.empty(topk, np.int32)
    weights = np.empty(topk, np.float32)
    cdef int32_t[::1] picks_view = picks
    cdef float[::1] weights_view = weights
    cdef uint32_t n = <uint32_t>logits.shape[0], flags
    if bias.shape[0] != n or not 1 <= topk <= n or n > 1024 or topk > 32:
        raise ValueError(f"route_select: {n} logits, {bias.shape[0]} biases, topk {topk}")
    with nogil:
        flags = route_select_host(&logits[0], &bias[0], n, topk, gate_temp, route_scale, norm_topk, &picks_view[0],
                                  &weights_view[0])
    return flags, picks, weights
