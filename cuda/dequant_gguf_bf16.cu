// SPDX-License-Identifier: MIT OR Apache-2.0
//
// GGUF blocks to bf16.
#include "common/q2_k_bf16.cuh"

using namespace metrale;

// out bf16 [n_blocks, 256] = bf16(ggml's f32 values). raw: rows of row_bytes bytes, each of row_bytes / 84
// blocks, with what is left of it unused; raw 4-byte, out 8-byte aligned. Grid ceil(n_blocks / 16), block
// 256.
extern "C" __global__ void dequant_q2_k_to_bf16(const uint8_t* __restrict__ raw,
                                                __nv_bfloat16* __restrict__ out, uint32_t n_blocks,
                                                uint32_t row_bytes) {
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t b = thread / KQUANT_THREADS;
    if (b >= n_blocks)
        return;
    const uint32_t in_row = row_bytes / Q2K::BYTES;
    const uint8_t* block = raw + b / in_row * row_bytes + b % in_row * Q2K::BYTES;
    q2_k_block_to_bf16(block, thread % KQUANT_THREADS, out + b * KQUANT_VALUES);
}
