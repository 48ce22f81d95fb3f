# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert selection on the host, from the header that the device kernel compiles too: the same bits."""

import numpy as np

from libc.stdint cimport int32_t, uint32_t

from metrale.errors import refuse

from metrale.ops.check cimport at_most, u32

cdef extern from "common/route.cuh" namespace "metrale" nogil:
    const uint32_t ROUTE_MAX_EXPERTS
    const uint32_t ROUTE_MAX_PICKS
    const uint32_t ROUTE_NOT_RESIDENT
    const uint32_t ROUTE_NOT_FINITE
    uint32_t route_select_host(const float* logits, const float* bias, uint32_t n_routed, uint32_t topk,
                               float gate_temp, float route_scale, uint32_t norm_topk, int32_t* picks, float* weights)

# The kernel's limits, and the bits of its flag word.
MAX_ROUTED = ROUTE_MAX_EXPERTS
MAX_TOPK = ROUTE_MAX_PICKS
NOT_RESIDENT = ROUTE_NOT_RESIDENT
NOT_FINITE = ROUTE_NOT_FINITE


def route_select(const float[::1] logits not None, const float[::1] bias not None, topk, float gate_temp,
                 float route_scale, bint norm_topk):
    """Select one token's experts.

    logits, bias: f32 ``[n_routed]``. Returns ``(flags, picks i32 [topk], weights f32 [topk])``, best pick first; where
    a logit or a bias is not finite, flags is ``NOT_FINITE`` and picks are -1. Refuses ``n_routed`` over ``MAX_ROUTED``,
    ``topk`` outside 1..min(n_routed, ``MAX_TOPK``), a bias of another length.
    """
    cdef uint32_t n = u32("n_routed", len(logits)), k = u32("topk", topk), flags
    at_most("n_routed", n, ROUTE_MAX_EXPERTS)
    at_most("topk", k, min(n, ROUTE_MAX_PICKS))
    if len(bias) != n:
        refuse("bias", f"{len(bias)} values", f"{n}, one a logit")
    picks = np.empty(k, np.int32)
    weights = np.empty(k, np.float32)
    cdef int32_t[::1] picks_view = picks
    cdef float[::1] weights_view = weights
    with nogil:
        flags = route_select_host(&logits[0], &bias[0], n, k, gate_temp, route_scale, norm_topk, &picks_view[0],
                                  &weights_view[0])
    return flags, picks, weights
