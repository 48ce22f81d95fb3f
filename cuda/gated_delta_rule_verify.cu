// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The gated delta rule for 2 to 17 tokens of a sequence without writing a state, and the update by those of
// them that were accepted: the formula, the layouts and the geometry are those of
// common/gated_delta_rule.cuh.
//
//     gated_delta_rule_verifyN: output, and corrections (d), f32 [batch, N, num_v_heads, v_dim]
//     gated_delta_rule_commit: H after the first accepted[b] (0 to tokens) of the tokens that corrections are
//     of,
//         with the bits of the state that gated_delta_rule_wyN keeps after that token; 0 writes nothing
//
// H is [batch, num_v_heads, k_dim, v_dim]; in the _table forms one pointer a sequence to [num_v_heads, k_dim,
// v_dim]. With a_log, f32 [num_v_heads], and dt_bias, likewise, gate and beta are raw: g = exp(-exp(a_log) *
// softplus(gate + dt_bias)), beta = sigmoid(beta). With unit_rows q and k are divided by sqrt(sum(x^2) +
// 1e-6).
#include "common/gated_delta_rule.cuh"

using namespace metrale;

#define GDN_SIZES                                                                                            \
    uint32_t batch_size, uint32_t num_k_heads, uint32_t num_v_heads, uint32_t k_dim, uint32_t v_dim,         \
        uint32_t qk_stride, uint32_t v_stride, uint32_t gb_stride
#define GDN_RAW const float *METRALE_NULLABLE a_log, const float *METRALE_NULLABLE dt_bias, uint32_t unit_rows

#define GDN_VERIFY(name, T, is_table, tokens)                                                                \
    extern "C" __global__ void __launch_bounds__(GDN_WARPS* WARP, GDN_BLOCKS)                                \
        name(const T* H, const __nv_bfloat16* query, const __nv_bfloat16* key, const __nv_bfloat16* value,   \
             const float* gate, const float* beta, __nv_bfloat16* output, float* corrections, GDN_SIZES,     \
             GDN_RAW) {                                                                                      \
        const GdnSizes s = {tokens, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride}; \
        gdn_verify<T>(H, query, key, value, gate, beta, output, corrections, s,                              \
                      {a_log, dt_bias, unit_rows != 0}, is_table);                                           \
    }
#define GDN_COMMIT(name, T, is_table)                                                                        \
    extern "C" __global__ void __launch_bounds__(GDN_WARPS* WARP, GDN_BLOCKS)                                \
        name(T* H, const __nv_bfloat16* key, const float* gate, const float* corrections,                    \
             const int32_t* accepted, uint32_t tokens, GDN_SIZES, GDN_RAW) {                                 \
        const GdnSizes s = {tokens, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride}; \
        gdn_commit<T>(H, key, gate, corrections, accepted, s, {a_log, dt_bias, unit_rows != 0}, is_table);   \
    }
#define GDN_VERIFIES(tokens)                                                                                 \
    GDN_VERIFY(gated_delta_rule_verify##tokens, float, false, tokens)                                        \
    GDN_VERIFY(gated_delta_rule_verify##tokens##_table, float, true, tokens)                                 \
    GDN_VERIFY(gated_delta_rule_verify##tokens##_f16, __half, false, tokens)                                 \
    GDN_VERIFY(gated_delta_rule_verify##tokens##_table_f16, __half, true, tokens)

GDN_VERIFIES(2)
GDN_VERIFIES(3)
GDN_VERIFIES(4)
GDN_VERIFIES(5)
GDN_VERIFIES(6)
GDN_VERIFIES(7)
GDN_VERIFIES(8)
GDN_VERIFIES(9)
GDN_VERIFIES(10)
GDN_VERIFIES(11)
GDN_VERIFIES(12)
GDN_VERIFIES(13)
GDN_VERIFIES(14)
GDN_VERIFIES(15)
GDN_VERIFIES(16)
GDN_VERIFIES(17)

GDN_COMMIT(gated_delta_rule_commit, float, false)
GDN_COMMIT(gated_delta_rule_commit_table, float, true)
GDN_COMMIT(gated_delta_rule_commit_f16, __half, false)
GDN_COMMIT(gated_delta_rule_commit_table_f16, __half, true)
