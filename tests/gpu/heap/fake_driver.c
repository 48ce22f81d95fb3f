// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A libcuda.so.1 that does nothing, and nothing on the heap: what the CUDA backend does itself is seen
// without a GPU. Every kernel has the parameters (pointer, pointer, 32 bits).
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, VERSION = 13000, ANY_ATTRIBUTE = 1024, NAME_BYTES = 5 };

static const size_t SIZES[] = {8, 8, 4};
static uint64_t next_handle = 0x10000;
static void* current;
static long launched;

static int succeed(void) { return SUCCESS; }

static int handle(uint64_t* out) {
    *out = next_handle += 0x1000;
    return SUCCESS;
}

static int number(int* out, int value) {
    *out = value;
    return SUCCESS;
}

static int driver_version(int* out) { return number(out, VERSION); }
static int device_count(int* out) { return number(out, 1); }
static int device(int* out) { return number(out, 0); }
static int attribute(int* out) { return number(out, ANY_ATTRIBUTE); }

static int device_name(char* out) {
    memcpy(out, "fake", NAME_BYTES);
    return SUCCESS;
}

static int get_current(void** out) {
    *out = current;
    return SUCCESS;
}

static int set_current(void* context) {
    current = context;
    return SUCCESS;
}

static int param_info(void* function, size_t index, size_t* offset, size_t* size) {
    (void)function;
    if (index >= sizeof(SIZES) / sizeof(*SIZES))
        return INVALID_VALUE;
    *offset = 8 * index;
    *size = SIZES[index];
    return SUCCESS;
}

static int launch(void) {
    ++launched;
    return SUCCESS;
}

long fake_launches(void) { return launched; }

// A function that is asked for fewer arguments than it is called with leaves the others where they are.
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, void* status);

static const struct {
    const char* name;
    void* function;
} FUNCTIONS[] = {
    {"cuDriverGetVersion", driver_version},
    {"cuDeviceGetCount", device_count},
    {"cuDeviceGet", device},
    {"cuDeviceGetName", device_name},
    {"cuDeviceGetAttribute", attribute},
    {"cuFuncGetAttribute", attribute},
    {"cuDevicePrimaryCtxRetain", handle},
    {"cuCtxGetCurrent", get_current},
    {"cuCtxSetCurrent", set_current},
    {"cuStreamCreate", handle},
    {"cuModuleLoadData", handle},
    {"cuModuleGetFunction", handle},
    {"cuMemAlloc", handle},
    {"cuFuncGetParamInfo", param_info},
    {"cuLaunchKernel", launch},
    {"cuGetProcAddress", cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, void* status) {
    (void)version, (void)flags, (void)status;
    *function = succeed;
    for (size_t i = 0; i < sizeof(FUNCTIONS) / sizeof(*FUNCTIONS); ++i)
        if (strcmp(name, FUNCTIONS[i].name) == 0)
            *function = FUNCTIONS[i].function;
    return SUCCESS;
}
