// SPDX-License-Identifier: MIT OR Apache-2.0
//
// CUDA's barriers, votes, shuffles and reductions.
#pragma once

#include "builtins.h"
#include "meetings.h"

namespace metrale::host {

template <class T, class Operation>
void combine_reduce(Lanes& lanes, unsigned mask) {
    T total = from_bits<T>(lanes.value[__builtin_ctz(mask)]);
    for_each_lane(mask & (mask - 1),
                  [&](unsigned lane) { total = Operation()(total, from_bits<T>(lanes.value[lane])); });
    for_each_lane(mask, [&](unsigned lane) { lanes.value[lane] = to_bits(total); });
}

template <class T>
T shuffle(const Site& site, unsigned mask, T value, unsigned source) {
    return from_bits<T>(meet_warp(site, mask, combine_shuffle, to_bits(value), source));
}

// First lane of the segment of `width` lanes that this thread is in.
inline unsigned segment(const Site& site, int width) {
    if (width < 1 || width > static_cast<int>(kWarp) || (width & (width - 1)))
        fail_at(site, "its width is not a power of two from 1 to 32");
    return lane_index() & ~static_cast<unsigned>(width - 1);
}

struct Min {
    template <class T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
struct Sum { // wraps, as the hardware's does
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
    }
};
struct And {
    unsigned operator()(unsigned a, unsigned b) const { return a & b; }
};
struct Or {
    unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};
struct Xor {
    unsigned operator()(unsigned a, unsigned b) const { return a ^ b; }
};

} // namespace metrale::host

// Every call carries the place it was made from; the name is the function's.
#define METRALE_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define METRALE_SITE                                                                                         \
    metrale::host::Site { __func__, file, line }

inline void __syncthreads(METRALE_CALLER) {
    metrale::host::meet_block(METRALE_SITE, metrale::host::Vote::none, 0);
}
inline int __syncthreads_or(int predicate, METRALE_CALLER) {
    return metrale::host::meet_block(METRALE_SITE, metrale::host::Vote::any, predicate);
}
inline int __syncthreads_and(int predicate, METRALE_CALLER) {
    return metrale::host::meet_block(METRALE_SITE, metrale::host::Vote::all, predicate);
}
inline int __syncthreads_count(int predicate, METRALE_CALLER) {
    return metrale::host::meet_block(METRALE_SITE, metrale::host::Vote::count, predicate);
}
inline void __syncwarp(unsigned mask = metrale::host::kAllLanes, METRALE_CALLER) {
    metrale::host::meet_warp(METRALE_SITE, mask, metrale::host::combine_none, 0, 0, true);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, METRALE_CALLER) {
    return static_cast<unsigned>(
        metrale::host::meet_warp(METRALE_SITE, mask, metrale::host::combine_ballot, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate, METRALE_CALLER) {
    return metrale::host::meet_warp(METRALE_SITE, mask, metrale::host::combine_ballot, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, METRALE_CALLER) {
    return metrale::host::meet_warp(METRALE_SITE, mask, metrale::host::combine_ballot, predicate != 0) ==
           mask;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, METRALE_CALLER) {
    const auto site = METRALE_SITE;
    const unsigned first = metrale::host::segment(site, width);
    return metrale::host::shuffle(site, mask, value, first + (static_cast<unsigned>(source) & (width - 1u)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, METRALE_CALLER) {
    const auto site = METRALE_SITE;
    const unsigned lane = metrale::host::lane_index(), first = metrale::host::segment(site, width);
    return metrale::host::shuffle(site, mask, value, delta <= lane - first ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, METRALE_CALLER) {
    const auto site = METRALE_SITE;
    const unsigned lane = metrale::host::lane_index(), end = metrale::host::segment(site, width) + width;
    return metrale::host::shuffle(site, mask, value, delta < end - lane ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, METRALE_CALLER) {
    const auto site = METRALE_SITE;
    const unsigned lane = metrale::host::lane_index(), end = metrale::host::segment(site, width) + width;
    const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
    return metrale::host::shuffle(site, mask, value, source < end ? source : lane);
}

#define METRALE_REDUCE(type, name, operation)                                                                \
    inline type name(unsigned mask, type value, METRALE_CALLER) {                                            \
        using namespace metrale::host;                                                                       \
        return from_bits<type>(                                                                              \
            meet_warp(METRALE_SITE, mask, combine_reduce<type, operation>, to_bits(value)));                 \
    }
METRALE_REDUCE(unsigned, __reduce_add_sync, Sum)
METRALE_REDUCE(unsigned, __reduce_min_sync, Min)
METRALE_REDUCE(unsigned, __reduce_max_sync, Max)
METRALE_REDUCE(int, __reduce_add_sync, Sum)
METRALE_REDUCE(int, __reduce_min_sync, Min)
METRALE_REDUCE(int, __reduce_max_sync, Max)
METRALE_REDUCE(unsigned, __reduce_and_sync, And)
METRALE_REDUCE(unsigned, __reduce_or_sync, Or)
METRALE_REDUCE(unsigned, __reduce_xor_sync, Xor)
#undef METRALE_REDUCE
