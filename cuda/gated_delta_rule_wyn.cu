// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The gated delta rule for 2 to 17 tokens of a sequence, with the states between them kept: the formula, the
// layouts and the geometry are those of common/gated_delta_rule.cuh. h_state holds the state before and at
// the end the last one, h_state_inter the one after each other token:
//
//     gated_delta_rule_wyN:        [batch, num_v_heads, k_dim, v_dim] at h_state, and of token t at
//     h_state_inter +
//                                  t * inter_stride, in elements of the state
//     gated_delta_rule_wyN_table:  pointers to [num_v_heads, k_dim, v_dim], of sequence b at h_state[b], and
//     of
//                                  token t at h_state_inter[t * inter_stride + b]
//
// N = 2, 3 and 4 are wyn2, wyn3 and wyn4, with the bits of wy2, wy3 and wy4.
#include "common/gated_delta_rule.cuh"

using namespace metrale;

// Compiled once for all numbers of tokens.
template <class T>
METRALE_CALLED void snapshot(T* h, const __nv_bfloat16* query, const __nv_bfloat16* key,
                             const __nv_bfloat16* value, const float* gate, const float* beta,
                             __nv_bfloat16* output, const GdnSizes s, const GdnStrided<T> inter) {
    gdn_snapshot(h, query, key, value, gate, beta, output, s, inter);
}

#define GDN_KERNEL(name, T, is_table, tokens)                                                                \
    extern "C" __global__ void __launch_bounds__(GDN_WARPS* WARP, GDN_BLOCKS)                                \
        name(T* h_state, const __nv_bfloat16* query, const __nv_bfloat16* key, const __nv_bfloat16* value,   \
             const float* gate, const float* beta, __nv_bfloat16* output, T* h_state_inter,                  \
             uint32_t inter_stride, uint32_t batch_size, uint32_t num_k_heads, uint32_t num_v_heads,         \
             uint32_t k_dim, uint32_t v_dim, uint32_t qk_stride, uint32_t v_stride, uint32_t gb_stride) {    \
        const GdnSizes s = {tokens, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride}; \
        const GdnStrided<T> inter = {h_state_inter, inter_stride, is_table};                                 \
        snapshot(h_state, query, key, value, gate, beta, output, s, inter);                                  \
    }
#define GDN_KERNELS(name, tokens)                                                                            \
    GDN_KERNEL(name, float, false, tokens)                                                                   \
    GDN_KERNEL(name##_table, float, true, tokens)                                                            \
    GDN_KERNEL(name##_f16, __half, false, tokens)                                                            \
    GDN_KERNEL(name##_f16_table, __half, true, tokens)

GDN_KERNELS(gated_delta_rule_wyn2, 2)
GDN_KERNELS(gated_delta_rule_wyn3, 3)
GDN_KERNELS(gated_delta_rule_wyn4, 4)
GDN_KERNELS(gated_delta_rule_wy5, 5)
GDN_KERNELS(gated_delta_rule_wy6, 6)
GDN_KERNELS(gated_delta_rule_wy7, 7)
GDN_KERNELS(gated_delta_rule_wy8, 8)
GDN_KERNELS(gated_delta_rule_wy9, 9)
GDN_KERNELS(gated_delta_rule_wy10, 10)
GDN_KERNELS(gated_delta_rule_wy11, 11)
GDN_KERNELS(gated_delta_rule_wy12, 12)
GDN_KERNELS(gated_delta_rule_wy13, 13)
GDN_KERNELS(gated_delta_rule_wy14, 14)
GDN_KERNELS(gated_delta_rule_wy15, 15)
GDN_KERNELS(gated_delta_rule_wy16, 16)
GDN_KERNELS(gated_delta_rule_wy17, 17)
