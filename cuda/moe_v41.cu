// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The MoE layer around its expert products: routing, SwiGLU, and the sum of the experts' rows.
#include "common/route.cuh"
#include "common/router.cuh"
#include "common/swiglu.cuh"

using namespace metrale;

// Element-wise kernels: eight values a thread, blocks of 256 threads, grid x = ceil(n / 2048) for rows of n.
__device__ __forceinline__ uint32_t first_of_eight() { return (blockIdx.x * blockDim.x + threadIdx.x) * 8; }

// h = bf16(silu(min(gate, limit)) * clamp(up, -limit, limit) * w[row]), the clamps only if limit > 0.
// gate, up, h bf16 [rows, inter]; w f32 [rows] or null (1). Grid (ceil(inter / 2048), 1..rows).
extern "C" __global__ void moe_v41_swiglu(const __nv_bfloat16* __restrict__ gate,
                                          const __nv_bfloat16* __restrict__ up,
                                          const float* __restrict__ METRALE_NULLABLE w,
                                          __nv_bfloat16* __restrict__ h, uint32_t rows, uint32_t inter,
                                          float limit) {
    const uint32_t i = first_of_eight();
    if (i >= inter)
        return;
    for (uint32_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const uint64_t start = static_cast<uint64_t>(row) * inter;
        const float weight = w ? w[row] : 1.0f;
        const F32x8 g = load8(gate + start, i, inter), u = load8(up + start, i, inter);
        F32x8 r;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            r.v[j] = swiglu(g.v[j], u.v[j], weight, limit);
        store8(h + start, i, inter, r);
    }
}

// acc f32 [dim] += src bf16 [n_rows, dim], row after row.
__device__ __forceinline__ void add_rows(float* __restrict__ acc, const __nv_bfloat16* __restrict__ src,
                                         uint32_t n_rows, uint32_t dim) {
    const uint32_t i = first_of_eight();
    if (i >= dim)
        return;
    F32x8 sum = load8(acc, i, dim);
#pragma unroll 4
    for (uint32_t row = 0; row < n_rows; ++row) {
        const F32x8 x = load8(src + static_cast<uint64_t>(row) * dim, i, dim);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            sum.v[j] += x.v[j];
    }
    store8(acc, i, dim, sum);
}

// acc f32 [n] += src bf16 [n].
extern "C" __global__ void moe_v41_accumulate(float* __restrict__ acc, const __nv_bfloat16* __restrict__ src,
                                              uint32_t n) {
    add_rows(acc, src, 1, n);
}

// The same bits as accumulating rows 0 .. n_rows - 1 of src bf16 [n_rows, dim] onto acc f32 [dim].
extern "C" __global__ void moe_v41_sum_rows(float* __restrict__ acc, const __nv_bfloat16* __restrict__ src,
                                            uint32_t n_rows, uint32_t dim) {
    add_rows(acc, src, n_rows, dim);
}

// out bf16 [n] = bf16(acc f32 [n]).
extern "C" __global__ void moe_v41_finish(const float* __restrict__ acc, __nv_bfloat16* __restrict__ out,
                                          uint32_t n) {
    const uint32_t i = first_of_eight();
    if (i < n)
        store8(out, i, n, load8(acc, i, n));
}

// C f32 [M, N] = A bf16 [M, K] * (B bf16 [N, K])^T, M in 1..8, summed in the order of common/router.cuh.
// One warp an output row of B: grid ceil(N / 4), block 128.
extern "C" __global__ void moe_v41_router_gemv_f32out(const __nv_bfloat16* __restrict__ A,
                                                      const __nv_bfloat16* __restrict__ B,
                                                      float* __restrict__ C, uint32_t M, uint32_t N,
                                                      uint32_t K) {
    const uint32_t n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (n >= N)
        return;
    if (wide_rows(A, K) && wide_rows(B, K))
        router_output<true>(A, B, C, n, M, N, K);
    else
        router_output<false>(A, B, C, n, M, N, K);
}

// The same bits, with eight warps at the loads of a row of B. Grid N, block 256, M * 8192 bytes of dynamic
// shared memory for the products.
extern "C" __global__ void moe_v41_router_gemv_f32out_products(const __nv_bfloat16* __restrict__ A,
                                                               const __nv_bfloat16* __restrict__ B,
                                                               float* __restrict__ C, uint32_t M, uint32_t N,
                                                               uint32_t K) {
    METRALE_DYNAMIC_SHARED(float, products);
    if (wide_rows(A, K) && wide_rows(B, K))
        router_output_staged<true>(A, B, C, products, blockIdx.x, M, N, K);
    else
        router_output_staged<false>(A, B, C, products, blockIdx.x, M, N, K);
}

// The best of the experts lane, lane + 32, ...
__device__ __forceinline__ RouteCandidate best_of_lane(const float* key, uint32_t n_routed) {
    RouteCandidate best = route_none();
    for (uint32_t id = threadIdx.x % WARP; id < n_routed; id += WARP)
        if (route_precedes({key[id], id}, best))
            best = {key[id], id};
    return best;
}

__device__ __forceinline__ RouteCandidate best_of_warp(RouteCandidate best) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const RouteCandidate other = {__shfl_xor_sync(FULL_WARP, best.key, offset),
                                      __shfl_xor_sync(FULL_WARP, best.id, offset)};
        if (route_precedes(other, best))
            best = other;
    }
    return best;
}

// What a lane knows of a token's selection: pick `lane`, its weight, its place in the plan and its slot.
struct RouteLane {
    float weight;
    uint32_t place;
    int32_t slot;
};

// One token's selection by one block, with the arithmetic of common/route.cuh; fills the header. True for the
// threads that hold a pick.
__device__ __forceinline__ bool route_token(const float* __restrict__ logits, const float* __restrict__ bias,
                                            uint32_t n_routed, uint32_t topk, float gate_temp,
                                            float route_scale, uint32_t norm_topk,
                                            const int32_t* __restrict__ slot_of, uint32_t* __restrict__ hdr,
                                            RouteLane& mine) {
    __shared__ float score[ROUTE_MAX_EXPERTS], key[ROUTE_MAX_EXPERTS];
    for (uint32_t id = threadIdx.x; id < n_routed; id += blockDim.x) {
        score[id] = route_score(logits[id], gate_temp);
        key[id] = score[id] + (bias ? bias[id] : 0.0f);
    }
    __syncthreads();
    if (threadIdx.x >= WARP)
        return false;

    // One warp selects; lane i keeps pick i.
    const uint32_t lane = threadIdx.x;
    bool finite = true;
    for (uint32_t id = lane; id < n_routed; id += WARP)
        finite = finite && is_finite(key[id]);
    finite = __all_sync(FULL_WARP, finite);

    uint32_t pick = 0;
    if (finite) {
        RouteCandidate candidate = best_of_lane(key, n_routed);
        for (uint32_t i = 0; i < topk; ++i) {
            const RouteCandidate best = best_of_warp(candidate);
            if (lane == i)
                pick = best.id;
            if (lane == best.id % WARP) {
                key[best.id] = route_none().key;
                candidate = best_of_lane(key, n_routed);
            }
        }
    }
    const float pick_score = finite ? score[pick] : 0.0f;
    float sum = 0.0f;
    mine.place = finite ? 0 : lane;
    for (uint32_t i = 0; i < topk; ++i) {
        sum += __shfl_sync(FULL_WARP, pick_score, i);
        mine.place += finite && __shfl_sync(FULL_WARP, pick, i) < pick;
    }
    mine.slot = finite ? slot_of[pick] : -1;
    mine.weight = finite ? route_weight(pick_score, sum, route_scale, norm_topk != 0) : 0.0f;
    const bool missing = __any_sync(FULL_WARP, lane < topk && mine.slot < 0);
    if (lane == 0)
        hdr[0] = !finite ? ROUTE_NOT_FINITE : missing ? ROUTE_NOT_RESIDENT : 0;
    if (lane >= topk)
        return false;
    hdr[1 + lane] = finite ? pick : ROUTE_NO_PICK;
    hdr[1 + topk + lane] = bits_from_float(mine.weight);
    hdr[1 + 2 * topk + mine.place] = static_cast<uint32_t>(mine.slot);
    return true;
}

// One token's selection. Grid 1, block 256.
//     logits, bias f32 [n_routed] (bias may be null); slot_of i32 [n_routed], -1 for an expert without a slot
//     hdr u32 [1 + 3 * topk] = flags, picks, weights (both best first), the plan's slots
//     plan_w f32 [topk]; plan_rows u32 [topk] = 0; ptrs u64 [3, topk], addresses of gate, up and down blocks
// where the plan is the picks in ascending id. A pick without a slot gets the addresses of slot 0, so that
// nothing faults. If nothing was selected, picks and slots are -1 and weights 0.
extern "C" __global__ void
moe_v41_route_select(const float* __restrict__ logits, const float* __restrict__ METRALE_NULLABLE bias,
                     uint32_t n_routed, uint32_t topk, float gate_temp, float route_scale, uint32_t norm_topk,
                     const int32_t* __restrict__ slot_of, uint64_t arena_base, uint64_t slot_bytes,
                     uint64_t gate_off, uint64_t up_off, uint64_t down_off, uint32_t* __restrict__ hdr,
                     float* __restrict__ plan_w, uint32_t* __restrict__ plan_rows,
                     uint64_t* __restrict__ ptrs) {
    RouteLane mine;
    if (!route_token(logits, bias, n_routed, topk, gate_temp, route_scale, norm_topk, slot_of, hdr, mine))
        return;
    const uint64_t block = arena_base + (mine.slot < 0 ? 0 : static_cast<uint64_t>(mine.slot)) * slot_bytes;
    plan_w[mine.place] = mine.weight;
    plan_rows[mine.place] = 0;
    ptrs[mine.place] = block + gate_off;
    ptrs[topk + mine.place] = block + up_off;
    ptrs[2 * topk + mine.place] = block + down_off;
}

// The selections of many tokens: logits f32 [tokens, n_routed] -> hdr u32 [tokens, 1 + 3 * topk]. Grid
// tokens, block 256.
extern "C" __global__ void moe_v41_route_select_tokens(const float* __restrict__ logits,
                                                       const float* __restrict__ METRALE_NULLABLE bias,
                                                       uint32_t n_routed, uint32_t topk, float gate_temp,
                                                       float route_scale, uint32_t norm_topk,
                                                       const int32_t* __restrict__ slot_of,
                                                       uint32_t* __restrict__ hdr) {
    RouteLane mine;
    route_token(logits + static_cast<uint64_t>(blockIdx.x) * n_routed, bias, n_routed, topk, gate_temp,
                route_scale, norm_topk, slot_of, hdr + static_cast<uint64_t>(blockIdx.x) * (1 + 3 * topk),
                mine);
}

// out bf16 [n_rows, dim] = the rows of x bf16 [., dim] that `rows` lists. Grid (ceil(dim / 2048), n_rows),
// block 256.
extern "C" __global__ void moe_v41_gather_rows(const __nv_bfloat16* __restrict__ x,
                                               const uint32_t* __restrict__ rows,
                                               __nv_bfloat16* __restrict__ out, uint32_t dim) {
    const uint32_t i = first_of_eight();
    if (i < dim)
        store8(out + static_cast<uint64_t>(blockIdx.y) * dim, i, dim,
               load8(x + static_cast<uint64_t>(rows[blockIdx.y]) * dim, i, dim));
}

// acc f32 [., dim]: row rows[r] += src bf16 [n_rows, dim], row r; no row twice. Grid (ceil(dim / 2048),
// n_rows), block 256.
extern "C" __global__ void moe_v41_scatter_add(float* __restrict__ acc, const __nv_bfloat16* __restrict__ src,
                                               const uint32_t* __restrict__ rows, uint32_t dim) {
    add_rows(acc + static_cast<uint64_t>(rows[blockIdx.y]) * dim,
             src + static_cast<uint64_t>(blockIdx.y) * dim, 1, dim);
}

// table i32 [layers, n_routed]: table[layer, expert] = slot for triples i32 [n, 3] of (layer, expert, slot),
// no (layer, expert) twice. Grid ceil(n / 256), block 256.
extern "C" __global__ void moe_v41_slot_table_set(int32_t* __restrict__ table, uint32_t n_routed,
                                                  const int32_t* __restrict__ triples, uint32_t n) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const int32_t* triple = triples + 3 * static_cast<uint64_t>(i);
    table[static_cast<uint64_t>(triple[0]) * n_routed + static_cast<uint32_t>(triple[1])] = triple[2];
}
