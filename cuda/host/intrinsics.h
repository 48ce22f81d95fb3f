// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Arithmetic that kernels call and neither <cmath> nor CUDA's headers give a C++ compiler. Where the hardware
// answers an odd input in a defined way (NaN to integer, a count of zero bits), so do these.
#pragma once

#include "meetings.h"

#include <climits>
#include <cstdint>
#include <cstring>
#include <features.h>
#include <math.h> // and not <cmath>: kernels say isnan without std

namespace metrale::host {

template <class To, class From>
To bit_copy(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Rounded by the caller; out of range saturates, NaN gives 0.
inline int to_int(float rounded) {
    if (rounded != rounded)
        return 0;
    return rounded >= 0x1p31f ? INT_MAX : rounded < -0x1p31f ? INT_MIN : static_cast<int>(rounded);
}
inline unsigned to_unsigned(float rounded) {
    if (!(rounded > 0.0f))
        return 0;
    return rounded >= 0x1p32f ? UINT_MAX : static_cast<unsigned>(rounded);
}

template <class T, class Operation>
unsigned each_byte(unsigned a, unsigned b, Operation operation) {
    unsigned result = 0;
    for (unsigned shift = 0; shift < 32; shift += 8) {
        const int x = static_cast<T>(a >> shift), y = static_cast<T>(b >> shift);
        result |= static_cast<unsigned>(operation(x, y) & 0xff) << shift;
    }
    return result;
}

} // namespace metrale::host

// --- bits ---
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i;
        const unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7)) & 0xff;
        result |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i; // bit 3: the byte's sign, repeated
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_l(low, high, shift) : low;
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_r(low, high, shift) : high;
}

inline int __float_as_int(float x) { return metrale::host::bit_copy<int>(x); }
inline unsigned __float_as_uint(float x) { return metrale::host::bit_copy<unsigned>(x); }
inline float __int_as_float(int x) { return metrale::host::bit_copy<float>(x); }
inline float __uint_as_float(unsigned x) { return metrale::host::bit_copy<float>(x); }
inline long long __double_as_longlong(double x) { return metrale::host::bit_copy<long long>(x); }
inline double __longlong_as_double(long long x) { return metrale::host::bit_copy<double>(x); }

// --- integers ---
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c); // the accumulator wraps
    for (unsigned shift = 0; shift < 32; shift += 8)
        sum += static_cast<unsigned>(static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift));
    return static_cast<int>(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (unsigned shift = 0; shift < 32; shift += 8)
        c += (a >> shift & 0xff) * (b >> shift & 0xff);
    return c;
}
inline unsigned __vadd4(unsigned a, unsigned b) {
    return metrale::host::each_byte<uint8_t>(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    return metrale::host::each_byte<uint8_t>(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
    return metrale::host::each_byte<int8_t>(a, b, [](int x, int y) {
        return x - y > 127 ? 127 : x - y < -128 ? -128 : x - y;
    });
}

// --- floats ---
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; } // NaN gives 0
#if !defined(__GLIBC__) || !__GLIBC_PREREQ(2, 42) // C23 names, in later C libraries
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#endif

inline int __float2int_rn(float x) { return metrale::host::to_int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return metrale::host::to_int(truncf(x)); }
inline int __float2int_rd(float x) { return metrale::host::to_int(floorf(x)); }
inline int __float2int_ru(float x) { return metrale::host::to_int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return metrale::host::to_unsigned(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return metrale::host::to_unsigned(truncf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// --- min and max: CUDA's overloads, which take mixed signs to unsigned ---
#define METRALE_MIN_MAX(type, a_type, b_type)                                                                \
    inline type min(a_type a, b_type b) { return static_cast<type>(b) < static_cast<type>(a) ? b : a; }      \
    inline type max(a_type a, b_type b) { return static_cast<type>(a) < static_cast<type>(b) ? b : a; }
METRALE_MIN_MAX(int, int, int)
METRALE_MIN_MAX(unsigned, unsigned, unsigned)
METRALE_MIN_MAX(unsigned, int, unsigned)
METRALE_MIN_MAX(unsigned, unsigned, int)
METRALE_MIN_MAX(long, long, long)
METRALE_MIN_MAX(unsigned long, unsigned long, unsigned long)
METRALE_MIN_MAX(long long, long long, long long)
METRALE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef METRALE_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// --- loads and stores with a cache hint ---
#define METRALE_LOAD(name)                                                                                   \
    template <class T>                                                                                       \
    T name(const T* address) {                                                                               \
        return *address;                                                                                     \
    }
#define METRALE_STORE(name)                                                                                  \
    template <class T>                                                                                       \
    void name(T* address, T value) {                                                                         \
        *address = value;                                                                                    \
    }
METRALE_LOAD(__ldg)
METRALE_LOAD(__ldca)
METRALE_LOAD(__ldcg)
METRALE_LOAD(__ldcs)
METRALE_LOAD(__ldlu)
METRALE_LOAD(__ldcv)
METRALE_STORE(__stwb)
METRALE_STORE(__stcg)
METRALE_STORE(__stcs)
METRALE_STORE(__stwt)
#undef METRALE_LOAD
#undef METRALE_STORE

[[noreturn]] inline void __trap() { metrale::host::fail("called __trap"); }
