// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Barriers and warp collectives are meetings: a thread that arrives hands in a value and sleeps; the last to
// arrive computes every result. So a meeting knows at any time who has come and who is missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#pragma GCC visibility push(hidden) // calls without a detour through the linkage table

namespace metrale::host {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// What a thread calls, and where: two calls meet only if both agree.
struct Site {
    const char* name;
    const char* file;
    int line;
};

// A warp's mailbox. A lane's entry is written by itself on arrival and by the meeting that it waits for.
struct Lanes {
    uint64_t value[kWarp];
    uint8_t source[kWarp]; // the lane a shuffle reads
};

// Turns the values handed in by the lanes of `mask` into their results.
using Combine = void (*)(Lanes& lanes, unsigned mask);

enum class Vote { none, any, all, count };

unsigned lane_index();
void* dynamic_shared();
// End the launch with an error of the running thread.
[[noreturn]] void fail(const char* what);
[[noreturn]] void fail_at(const Site& site, const char* what);
int meet_block(const Site& site, Vote vote, int predicate);
// `exits_count`: lanes that have exited are as good as arrived (they hand in nothing).
uint64_t meet_warp(const Site& site, unsigned mask, Combine combine, uint64_t value, unsigned source = 0,
                   bool exits_count = false);

void combine_none(Lanes&, unsigned);
void combine_shuffle(Lanes&, unsigned);
void combine_ballot(Lanes&, unsigned);

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane's value is up to 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof(T)); // __half2 is plain in all but name
    return value;
}

template <class Visit>
void for_each_lane(unsigned mask, Visit visit) {
    for (; mask; mask &= mask - 1)
        visit(static_cast<unsigned>(__builtin_ctz(mask)));
}

} // namespace metrale::host

#pragma GCC visibility pop
