// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that see the attributes of their launch, for the tests of the runtime.
#include "common/types.cuh"

namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTERS
#endif

#ifdef __CUDA_ARCH__
#define READ_SPECIAL(to, name) asm volatile("mov.u32 %0, %%" name ";" : "=r"(to))

__device__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#endif

// Let the kernel after this one start, if its launch allows that.
__device__ void let_next_start() {
#ifdef CLUSTERS
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the kernel before this one is done, if this one was started early.
__device__ void wait_for_previous() {
#ifdef CLUSTERS
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Wait until *flag is set, for `ns` at most. On the host nothing else runs, and nothing is waited for.
__device__ void wait_for(const unsigned* flag, unsigned ns) {
#ifdef __CUDA_ARCH__
    const unsigned long long start = now_ns();
    while (*static_cast<const volatile unsigned*>(flag) == 0 && now_ns() - start < ns) {
    }
#endif
}

} // namespace

// Of each block four words: the blocks of its cluster in x, y and z, and its place among them. On the host 1,
// 1, 1, 0.
extern "C" __global__ void look(unsigned* out) {
    unsigned x = 1, y = 1, z = 1, rank = 0;
#ifdef CLUSTERS
    READ_SPECIAL(x, "cluster_nctaid.x");
    READ_SPECIAL(y, "cluster_nctaid.y");
    READ_SPECIAL(z, "cluster_nctaid.z");
    READ_SPECIAL(rank, "cluster_ctarank");
#endif
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned seen[] = {x, y, z, rank};
    if (threadIdx.x == 0)
        for (unsigned i = 0; i < 4; ++i)
            out[4 * block + i] = seen[i];
}

// Every block writes its number, waits for all others, and reads the next one's: out[i] = (i + 1) % blocks.
// `arrived` is 0 before. Grid (blocks, 1, 1), cooperative.
extern "C" __global__ void meet(unsigned* arrived, unsigned* numbers, unsigned* out) {
    if (threadIdx.x != 0)
        return;
    numbers[blockIdx.x] = blockIdx.x;
    __threadfence();
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
    __threadfence();
    const volatile unsigned* others = numbers;
    out[blockIdx.x] = others[(blockIdx.x + 1) % gridDim.x];
}

// seen[0]: whether *flag was set while this kernel ran, which is until then, or for `ns`. One thread.
extern "C" __global__ void lead(const unsigned* flag, unsigned* seen, unsigned ns) {
    let_next_start();
    wait_for(flag, ns);
    *seen = *static_cast<const volatile unsigned*>(flag);
}

// Sets *flag without waiting for anything. One thread.
extern "C" __global__ void follow(unsigned* flag) {
    *flag = 1;
    __threadfence();
}

// out[i] = value after `ns`, while the next kernel may have started. `never` is a word that stays 0. One
// block.
extern "C" __global__ void fill_late(unsigned* out, unsigned value, const unsigned* never, unsigned ns) {
    let_next_start();
    wait_for(never, ns);
    out[threadIdx.x] = value;
}

// out[i] = in[i], once the kernel before this one is done. One block.
extern "C" __global__ void copy_after(const unsigned* in, unsigned* out) {
    wait_for_previous();
    out[threadIdx.x] = static_cast<const volatile unsigned*>(in)[threadIdx.x];
}
