// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The experts of many tokens, each projection one launch. A token's pick is an assignment; the rows that the
// experts compute are the assignments in ascending expert, then ascending token. Their places, and the tiles
// of rows that the launches take, are made here from the selections (hdr of moe_v41_route_select_tokens), so
// that the host need not wait for them. Tokens without a selection have no rows.
#include "common/kquant_tile.cuh"
#include "common/mmvq.cuh"
#include "common/route.cuh"
#include "common/vec8.cuh"

using namespace metrale;

constexpr uint32_t SCHEDULE_THREADS = ROUTE_MAX_EXPERTS; // one an expert
constexpr uint32_t NO_ROW = 0xffffffffu;

// Rows first .. first + rows - 1, all of one expert.
struct Tile {
    uint32_t expert, first, rows, unused;
};

// The sum of x over the threads before this one; `warps` is [32] in shared memory.
__device__ __forceinline__ uint32_t sum_before(uint32_t x, uint32_t* warps) {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t sum = x;
    for (uint32_t offset = 1; offset < WARP; offset *= 2) {
        const uint32_t other = __shfl_up_sync(FULL_WARP, sum, offset);
        sum += lane >= offset ? other : 0;
    }
    __syncthreads();
    if (lane == WARP - 1)
        warps[warp] = sum;
    __syncthreads();
    uint32_t before = sum - x;
    for (uint32_t w = 0; w < warp; ++w)
        before += warps[w];
    return before;
}

__device__ __forceinline__ uint32_t pick_of(const uint32_t* __restrict__ hdr, uint32_t assignment,
                                            uint32_t topk) {
    return hdr[static_cast<uint64_t>(assignment / topk) * (1 + 3 * topk) + 1 + assignment % topk];
}

// hdr u32 [tokens, 1 + 3 * topk] -> offsets u32 [n_routed + 1], the first row of each expert and their
// number; tiles [*n_tiles] of up to tile_rows rows, of the experts first .. last - 1. Grid 1, block 1024.
extern "C" __global__ void moe_grouped_tiles(const uint32_t* __restrict__ hdr, uint32_t tokens, uint32_t topk,
                                             uint32_t n_routed, uint32_t first, uint32_t last,
                                             uint32_t tile_rows, uint32_t* __restrict__ offsets,
                                             uint32_t* __restrict__ tiles, uint32_t* __restrict__ n_tiles) {
    __shared__ uint32_t count[SCHEDULE_THREADS], warps[SCHEDULE_THREADS / WARP];
    const uint32_t expert = threadIdx.x;
    count[expert] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tokens * topk; i += SCHEDULE_THREADS) {
        const uint32_t pick = pick_of(hdr, i, topk);
        if (pick != ROUTE_NO_PICK)
            atomicAdd(&count[pick], 1u); // of integers: the order does not show
    }
    __syncthreads();
    const uint32_t rows = count[expert], start = sum_before(rows, warps);
    if (expert < n_routed)
        offsets[expert] = start;
    if (expert + 1 == n_routed)
        offsets[n_routed] = start + rows;

    const uint32_t mine = expert >= first && expert < last ? (rows + tile_rows - 1) / tile_rows : 0;
    const uint32_t place = sum_before(mine, warps);
    for (uint32_t i = 0; i < mine; ++i) {
        const uint32_t done = i * tile_rows;
        reinterpret_cast<Tile*>(tiles)[place + i] = {expert, start + done,
                                                     rows - done < tile_rows ? rows - done : tile_rows, 0};
    }
    if (expert == SCHEDULE_THREADS - 1)
        *n_tiles = place + mine;
}

// Where the rows come from and go to: row_token u32, row_weight f32 [tokens * topk]; token_rows u32
// [tokens, topk], a token's rows in ascending expert, NO_ROW for a token without a selection; ptrs u64
// [3, n_routed], addresses of gate, up and down blocks (of slot 0 for an expert without a slot).
// Grid n_routed, block 256.
extern "C" __global__ void moe_grouped_rows(const uint32_t* __restrict__ hdr, uint32_t tokens, uint32_t topk,
                                            uint32_t n_routed, const uint32_t* __restrict__ offsets,
                                            const int32_t* __restrict__ slot_of, uint64_t arena_base,
                                            uint64_t slot_bytes, uint64_t gate_off, uint64_t up_off,
                                            uint64_t down_off, uint32_t* __restrict__ row_token,
                                            float* __restrict__ row_weight, uint32_t* __restrict__ token_rows,
                                            uint64_t* __restrict__ ptrs) {
    __shared__ uint32_t warps[256 / WARP];
    const uint32_t expert = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        const int32_t slot = slot_of[expert];
        const uint64_t block = arena_base + (slot < 0 ? 0 : static_cast<uint64_t>(slot)) * slot_bytes;
        ptrs[expert] = block + gate_off;
        ptrs[n_routed + expert] = block + up_off;
        ptrs[2 * n_routed + expert] = block + down_off;
    }
    uint32_t row = offsets[expert];
    const uint32_t end = offsets[expert + 1];
    for (uint32_t base = 0; base < tokens * topk && (row < end || expert == 0); base += blockDim.x) {
        const uint32_t i = base + threadIdx.x;
        const uint32_t pick = i < tokens * topk ? pick_of(hdr, i, topk) : n_routed;
        if (expert == 0 && pick == ROUTE_NO_PICK)
            token_rows[i] = NO_ROW;
        const uint32_t ballot = __ballot_sync(FULL_WARP, pick == expert);
        __syncthreads();
        if (lane == 0)
            warps[warp] = __popc(ballot);
        __syncthreads();
        uint32_t mine = row + __popc(ballot & ((1u << lane) - 1));
        for (uint32_t w = 0; w < blockDim.x / WARP; ++w) {
            mine += w < warp ? warps[w] : 0;
            row += warps[w];
        }
        if (pick != expert)
            continue;
        const uint32_t token = i / topk;
        const uint32_t* header = hdr + static_cast<uint64_t>(token) * (1 + 3 * topk);
        uint32_t place = 0;
        for (uint32_t p = 0; p < topk; ++p)
            place += header[1 + p] < expert;
        row_token[mine] = token;
        row_weight[mine] = float_from_bits(header[1 + topk + i % topk]);
        token_rows[token * topk + place] = mine;
    }
}

// For each token: acc f32 [tokens, dim] = the sum of its rows of src bf16 [., dim] in ascending expert, then
// that of `shared` bf16 [tokens, dim], each addition rounded to f32; out bf16 of it. token_rows as above, or
// null for one token with the rows 0 .. topk - 1. Grid (ceil(dim / 2048), tokens), block 256.
extern "C" __global__ void moe_grouped_combine(const __nv_bfloat16* __restrict__ src,
                                               const uint32_t* __restrict__ METRALE_NULLABLE token_rows,
                                               const __nv_bfloat16* __restrict__ shared,
                                               float* __restrict__ acc, __nv_bfloat16* __restrict__ out,
                                               uint32_t topk, uint32_t dim) {
    const uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * 8, token = blockIdx.y;
    if (i >= dim)
        return;
    F32x8 sum = {};
    const auto add = [&](const __nv_bfloat16* row) {
        const F32x8 x = load8(row, i, dim);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            sum.v[j] += x.v[j];
    };
#pragma unroll 4
    for (uint32_t p = 0; p < topk; ++p) {
        const uint32_t row = token_rows ? token_rows[static_cast<uint64_t>(token) * topk + p] : p;
        if (row != NO_ROW)
            add(src + static_cast<uint64_t>(row) * dim);
    }
    const uint64_t start = static_cast<uint64_t>(token) * dim;
    add(shared + start);
    store8(acc + start, i, dim, sum);
    store8(out + start, i, dim, sum);
}

// One projection of all experts, or two that share y: out bf16 [rows, N], row r = y[rows[r]] (y[r] where rows
// is null) times the blocks [N, K/256] at tables[expert of r]. Projection z reads tables + z * n_routed and
// writes out + z * out_rows * N. Blocks beyond *n_tiles do nothing.

// y q8_1 rows; tiles of up to 8 rows. Grid (ceil(N / 8), tiles, projections), block 256.
#define MMVQ_GROUPED(name, Format)                                                                           \
    extern "C" __global__ void name(const uint64_t* __restrict__ tables, const uint8_t* __restrict__ y,      \
                                    const uint32_t* __restrict__ METRALE_NULLABLE rows,                      \
                                    __nv_bfloat16* __restrict__ out, const uint32_t* __restrict__ tiles,     \
                                    const uint32_t* __restrict__ n_tiles, uint32_t K, uint32_t N,            \
                                    uint32_t n_routed, uint32_t out_rows) {                                  \
        mmvq_grouped<Format>(tables, y, rows, out, tiles, n_tiles, K, N, n_routed, out_rows);                \
    }

constexpr uint32_t MMVQ_GROUPED_WARPS = 8;

template <class Format>
__device__ __forceinline__ void
mmvq_grouped(const uint64_t* __restrict__ tables, const uint8_t* __restrict__ y,
             const uint32_t* __restrict__ rows, __nv_bfloat16* __restrict__ out,
             const uint32_t* __restrict__ tiles, const uint32_t* __restrict__ n_tiles, uint32_t K, uint32_t N,
             uint32_t n_routed, uint32_t out_rows) {
    if (blockIdx.y >= *n_tiles)
        return;
    const Tile tile = reinterpret_cast<const Tile*>(tiles)[blockIdx.y];
    const auto* w = reinterpret_cast<const uint8_t*>(tables[blockIdx.z * n_routed + tile.expert]);
    out += (static_cast<uint64_t>(blockIdx.z) * out_rows + tile.first) * N;
    if (rows)
        mmvq<Format, MMVQ_GROUPED_WARPS>(w, y, out, K, N, tile.rows, RowsListed{rows + tile.first});
    else
        mmvq<Format, MMVQ_GROUPED_WARPS>(
            w, y + static_cast<uint64_t>(tile.first) * (K / Q8_1_VALUES * Q8_1_BYTES), out, K, N, tile.rows);
}

MMVQ_GROUPED(kquant_mmvq_q2_k_grouped, Q2K)
MMVQ_GROUPED(kquant_mmvq_q3_k_grouped, Q3K)

// y of y_rows rows in the blocks of common/q8_mmq.cuh, D2S6 for Q2_K and D4 for Q3_K; tiles of up to COLS
// rows. Grid (ceil(N / 128), tiles, projections), block 256.
#define MMQ_GROUPED(name, Format, COLS)                                                                      \
    extern "C" __global__ void name(const uint64_t* __restrict__ tables, const uint8_t* __restrict__ y,      \
                                    const uint32_t* __restrict__ METRALE_NULLABLE rows,                      \
                                    __nv_bfloat16* __restrict__ out, const uint32_t* __restrict__ tiles,     \
                                    const uint32_t* __restrict__ n_tiles, uint32_t K, uint32_t N,            \
                                    uint32_t n_routed, uint32_t out_rows, uint32_t y_rows) {                 \
        mmq_grouped<Format, COLS>(tables, y, rows, out, tiles, n_tiles, K, N, n_routed, out_rows, y_rows);   \
    }

template <class Format, int COLS>
__device__
__forceinline__ void mmq_grouped(const uint64_t* __restrict__ tables, const uint8_t* __restrict__ y,
                                 const uint32_t* __restrict__ rows, __nv_bfloat16* __restrict__ out,
                                 const uint32_t* __restrict__ tiles, const uint32_t* __restrict__ n_tiles,
                                 uint32_t K, uint32_t N, uint32_t n_routed, uint32_t out_rows,
                                 uint32_t y_rows) {
    __shared__ TileStage<COLS> stage;
    if (blockIdx.y >= *n_tiles)
        return;
    const Tile tile = reinterpret_cast<const Tile*>(tiles)[blockIdx.y];
    const auto* w = reinterpret_cast<const uint8_t*>(tables[blockIdx.z * n_routed + tile.expert]);
    if (threadIdx.x < tile.rows)
        stage.row[threadIdx.x] = rows ? rows[tile.first + threadIdx.x] : tile.first + threadIdx.x;
    out += (static_cast<uint64_t>(blockIdx.z) * out_rows + tile.first) * N;
    kquant_tile<Format, COLS, true>(stage, w, static_cast<uint64_t>(K / KQUANT_VALUES) * Format::BYTES, y,
                                    mmq_padded(y_rows), blockIdx.x * TILE_ROWS, N, K, tile.rows,
                                    [&](uint32_t col, uint32_t n, float value) {
                                        out[static_cast<uint64_t>(col) * N + n] = __float2bfloat16_rn(value);
                                    });
}

MMQ_GROUPED(kquant_mmq_q2_k_grouped16, Q2KTile, 16)
MMQ_GROUPED(kquant_mmq_q2_k_grouped128, Q2KTile, 128)
MMQ_GROUPED(kquant_mmq_q3_k_grouped16, Q3KTile, 16)
MMQ_GROUPED(kquant_mmq_q3_k_grouped128, Q3KTile, 128)
