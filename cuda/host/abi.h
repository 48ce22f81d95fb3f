/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The C interface of a library of host kernels, as cuda/host/build.py makes them. */
#ifndef METRALE_HOST_ABI_H
#define METRALE_HOST_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define METRALE_HOST_API __attribute__((visibility("default")))

enum { METRALE_PTR = 1, METRALE_INT = 2, METRALE_FLOAT = 3, METRALE_BYTES = 4 };

enum { METRALE_FORWARD = 0, METRALE_REVERSED = 1, METRALE_SHUFFLED = 2 };

/* What a launch is held to: the limits of compute capability 9.0. */
enum {
    METRALE_MAX_GRID_X = 0x7fffffff,
    METRALE_MAX_GRID_Y = 0xffff,
    METRALE_MAX_GRID_Z = 0xffff,
    METRALE_MAX_BLOCK_X = 1024,
    METRALE_MAX_BLOCK_Y = 1024,
    METRALE_MAX_BLOCK_Z = 64,
    METRALE_MAX_THREADS = 1024,       /* of a block */
    METRALE_MAX_SHARED_BYTES = 232448 /* of a block; here its dynamic shared memory alone */
};

typedef struct {
    const char* name;
    uint8_t kind;
    uint8_t is_signed; /* of an integer */
    uint32_t size;     /* bytes */
} metrale_param;

typedef struct {
    const char* module;
    const char* name;
    uint32_t n_params;
    const metrale_param* params;
    /* Private to the library. */
    void (*function)(void);
    void (*invoke)(void (*function)(void), void** args);
} metrale_host_kernel;

typedef struct {
    uint32_t grid[3], block[3];
    size_t shared_bytes; /* dynamic shared memory of a block */
    int order;           /* of the threads of a block, and of the blocks */
    uint64_t seed;       /* of METRALE_SHUFFLED */
    int strict;          /* threads that have exited are missing at a barrier */
    uint32_t workers;    /* operating system threads; 0: one a core */
} metrale_host_config;

/* Every kernel of the library, for as long as the process lives. */
METRALE_HOST_API const metrale_host_kernel* metrale_host_kernels(size_t* count);

/* Runs a grid to its end; args[i] points at the value of parameter i. Returns 0, or non-zero with a message
 * that names kernel, block and thread. Any number of threads may launch at once. */
METRALE_HOST_API int metrale_host_launch(const metrale_host_kernel* kernel, const metrale_host_config* config,
                                         void** args, char* message, size_t message_bytes);

#ifdef __cplusplus
}
#endif
#endif
