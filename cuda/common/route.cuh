// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The arithmetic of expert selection, shared by moe_v41_route_select and by the selection on the host, so
// that both give the same bits. Plain C++ without CUDA's headers.
//
//     score  = sqrt(softplus(logit / gate_temp))
//     picks  = the top-k experts by score + bias, ties to the lower id, best first
//     weight = score [/ (sum of the picks' scores, in pick order, + 1e-20)] * route_scale
#pragma once

#include "common/math.cuh"

namespace metrale {

constexpr uint32_t ROUTE_MAX_EXPERTS = 1024;
constexpr uint32_t ROUTE_MAX_PICKS = 32;

constexpr uint32_t ROUTE_NO_PICK = 0xffffffffu; // where nothing was selected

// Bits of the flag word.
constexpr uint32_t ROUTE_NOT_RESIDENT = 1; // a pick has no slot
constexpr uint32_t ROUTE_NOT_FINITE = 2;   // a logit (or a bias) is NaN or infinite: nothing was selected

// A logit that is not finite scores NaN.
METRALE_BOTH float route_score(float logit, float gate_temp) {
    const float x = logit / gate_temp;
    if (!is_finite(x))
        return float_from_bits(F32_NAN_BITS);
    if (x < -17.0f)
        return exp_f32(0.5f * x); // softplus(x) is e^x to f32 there, and the root of e^x is no subnormal
    return sqrtf(x > 20.0f ? x : log1p_f32(exp_f32(x)));
}

METRALE_BOTH float route_weight(float score, float sum, float route_scale, bool norm_topk) {
    return (norm_topk ? score / (sum + 1e-20f) : score) * route_scale;
}

struct RouteCandidate {
    float key; // score + bias
    uint32_t id;
};

METRALE_BOTH bool route_precedes(const RouteCandidate& a, const RouteCandidate& b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

// What every key precedes: the start of a search, and the key of an expert already taken.
METRALE_BOTH RouteCandidate route_none() { return {-float_from_bits(F32_INF_BITS), ROUTE_MAX_EXPERTS}; }

#ifndef __CUDACC__
// One token. logits [n_routed], bias [n_routed] or null -> picks [topk], weights [topk], best first. Returns
// 0 or ROUTE_NOT_FINITE, then with picks -1 and weights 0. topk <= n_routed <= ROUTE_MAX_EXPERTS.
inline uint32_t route_select_host(const float* logits, const float* bias, uint32_t n_routed, uint32_t topk,
                                  float gate_temp, float route_scale, uint32_t norm_topk, int32_t* picks,
                                  float* weights) {
    float score[ROUTE_MAX_EXPERTS], key[ROUTE_MAX_EXPERTS];
    bool finite = true;
    for (uint32_t id = 0; id < n_routed; ++id) {
        score[id] = route_score(logits[id], gate_temp);
        key[id] = score[id] + (bias ? bias[id] : 0.0f);
        finite = finite && is_finite(key[id]);
    }
    if (!finite) {
        for (uint32_t k = 0; k < topk; ++k)
            picks[k] = -1, weights[k] = 0.0f;
        return ROUTE_NOT_FINITE;
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < topk; ++k) {
        RouteCandidate best = route_none();
        for (uint32_t id = 0; id < n_routed; ++id)
            if (route_precedes({key[id], id}, best))
                best = {key[id], id};
        key[best.id] = route_none().key;
        picks[k] = static_cast<int32_t>(best.id);
        weights[k] = score[best.id];
        sum += score[best.id];
    }
    for (uint32_t k = 0; k < topk; ++k)
        weights[k] = route_weight(weights[k], sum, route_scale, norm_topk != 0);
    return 0;
}
#endif

} // namespace metrale
