// SPDX-License-Identifier: MIT OR Apache-2.0
//
// To be preloaded: counts the allocations of the thread that called mallocs_start(), by the library that asks
// for each.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { CALLERS = 4096 };

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static __thread int counting __attribute__((tls_model("initial-exec")));
static struct {
    void* caller;
    long count;
} callers[CALLERS];
static long lost;

static void count(void* caller) {
    if (!counting)
        return;
    for (int i = 0; i < CALLERS; ++i) {
        if (!callers[i].caller)
            callers[i].caller = caller;
        if (callers[i].caller == caller) {
            ++callers[i].count;
            return;
        }
    }
    ++lost;
}

#define COUNT() count(__builtin_return_address(0))

void* malloc(size_t n) {
    COUNT();
    return __libc_malloc(n);
}

void* calloc(size_t n, size_t size) {
    COUNT();
    return __libc_calloc(n, size);
}

void* realloc(void* p, size_t n) {
    COUNT();
    return __libc_realloc(p, n);
}

void* memalign(size_t alignment, size_t n) {
    COUNT();
    return __libc_memalign(alignment, n);
}

void* aligned_alloc(size_t alignment, size_t n) {
    COUNT();
    return __libc_memalign(alignment, n);
}

int posix_memalign(void** p, size_t alignment, size_t n) {
    COUNT();
    *p = __libc_memalign(alignment, n);
    return *p ? 0 : ENOMEM;
}

// operator new and new[]: else the C++ library would be who asks.
void* _Znwm(size_t n) {
    COUNT();
    return __libc_malloc(n);
}

void* _Znam(size_t n) {
    COUNT();
    return __libc_malloc(n);
}

void mallocs_start(void) {
    memset(callers, 0, sizeof(callers));
    counting = 1;
}

void mallocs_stop(void) { counting = 0; }

// One line a caller: its count and its library. Returns how many allocations are in no line.
long mallocs_report(char* text, size_t size) {
    size_t used = 0;
    Dl_info info;
    for (int i = 0; i < CALLERS && callers[i].caller && used < size; ++i) {
        const char* name = dladdr(callers[i].caller, &info) && info.dli_fname ? info.dli_fname : "unknown";
        used += (size_t)snprintf(text + used, size - used, "%ld %s\n", callers[i].count, name);
    }
    return lost + (used >= size);
}
