// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The gated delta rule for 3 tokens of a sequence, with the states between them kept: the formula, the
// layouts and the geometry are those of common/gated_delta_rule.cuh. Of sequence b, h_state holds the state
// before and at the end the last one; h_state_inter`t` receives the one after token t. They are [batch,
// num_v_heads, k_dim, v_dim] or, if state_is_table, one pointer a sequence to [num_v_heads, k_dim, v_dim].
#include "common/gated_delta_rule.cuh"

using namespace metrale;

#define GDN_KERNEL(name, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(GDN_WARPS* WARP, GDN_BLOCKS) name(                          \
        T* h_state, const __nv_bfloat16* query, const __nv_bfloat16* key, const __nv_bfloat16* value,        \
        const float* gate, const float* beta, __nv_bfloat16* output, T* h_state_inter0, T* h_state_inter1,   \
        uint32_t batch_size, uint32_t num_k_heads, uint32_t num_v_heads, uint32_t k_dim, uint32_t v_dim,     \
        uint32_t qk_stride, uint32_t v_stride, uint32_t gb_stride, uint32_t state_is_table) {                \
        const GdnSizes s = {3, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride};      \
        const GdnSeparate<T> inter = {h_state_inter0, h_state_inter1, nullptr, state_is_table != 0};         \
        gdn_snapshot(h_state, query, key, value, gate, beta, output, s, inter);                              \
    }

GDN_KERNEL(gated_delta_rule_wy3, float)
GDN_KERNEL(gated_delta_rule_wy3_f16, __half)
