// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What the last lane to arrive computes for all of them.
#include "metrale_host.h"

namespace metrale::host {

void combine_none(Lanes&, unsigned) {}

void combine_shuffle(Lanes& lanes, unsigned mask) {
    uint64_t before[kWarp];
    std::memcpy(before, lanes.value, sizeof before);
    for_each_lane(mask, [&](unsigned lane) { lanes.value[lane] = before[lanes.source[lane]]; });
}

void combine_ballot(Lanes& lanes, unsigned mask) {
    unsigned votes = 0;
    for_each_lane(mask, [&](unsigned lane) { votes |= static_cast<unsigned>(lanes.value[lane]) << lane; });
    for_each_lane(mask, [&](unsigned lane) { lanes.value[lane] = votes; });
}

namespace {

constexpr unsigned kM = 16, kN = 8;

struct Halves {
    static constexpr unsigned k = 16, per_word = 2;
    using Accumulator = float;
    using Product = double;
    static float add(float c, double sum) { return static_cast<float>(c + sum); }
};

struct Bf16 : Halves {
    static float a(uint32_t word, unsigned i) {
        const uint32_t bits = word >> 16 * i << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static float b(uint32_t word, unsigned i) { return a(word, i); }
};

struct F16 : Halves {
    static float a(uint32_t word, unsigned i) {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16 * i)));
    }
    static float b(uint32_t word, unsigned i) { return a(word, i); }
};

struct U8S8 {
    static constexpr unsigned k = 32, per_word = 4;
    using Accumulator = int;
    using Product = int;
    static int a(uint32_t word, unsigned i) { return static_cast<uint8_t>(word >> 8 * i); }
    static int b(uint32_t word, unsigned i) { return static_cast<int8_t>(word >> 8 * i); }
    static int add(int c, int sum) {
        return static_cast<int>(static_cast<unsigned>(c) + static_cast<unsigned>(sum));
    }
};

// PTX ISA, "Matrix fragments for mma.m16n8k16 and mma.m16n8k32": lane = 4 * group + quad. Word i of A holds
// row group + 8 * (i & 1), word i of B column group; both hold the per_word values of k from per_word * quad,
// + k / 2 for the upper words. d[i] is row group + 8 * (i >> 1), column 2 * quad + (i & 1).
template <class Format>
void combine_mma(Lanes& lanes, unsigned) {
    constexpr unsigned k = Format::k, per_word = Format::per_word;
    using Accumulator = typename Format::Accumulator;
    using Product = typename Format::Product;
    const auto fragments = [&](unsigned lane) -> MmaFragments<Accumulator>& {
        return *reinterpret_cast<MmaFragments<Accumulator>*>(static_cast<uintptr_t>(lanes.value[lane]));
    };
    Product a[kM][k], b[k][kN], sum[kM][kN] = {};
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const auto& words = fragments(lane);
        const unsigned group = lane / 4, first = lane % 4 * per_word;
        for (unsigned i = 0; i < per_word; ++i)
            for (unsigned half = 0; half < 2; ++half) {
                const unsigned at = first + i + half * k / 2;
                a[group][at] = Format::a(words.a[2 * half], i);
                a[group + 8][at] = Format::a(words.a[2 * half + 1], i);
                b[at][group] = Format::b(words.b[half], i);
            }
    }
    for (unsigned row = 0; row < kM; ++row)
        for (unsigned i = 0; i < k; ++i)
            for (unsigned column = 0; column < kN; ++column)
                sum[row][column] += a[row][i] * b[i][column];
    for (unsigned lane = 0; lane < kWarp; ++lane)
        for (unsigned i = 0; i < 4; ++i) {
            Accumulator& d = fragments(lane).d[i];
            d = Format::add(d, sum[lane / 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)]);
        }
}

} // namespace

void combine_mma_bf16(Lanes& lanes, unsigned mask) { combine_mma<Bf16>(lanes, mask); }
void combine_mma_f16(Lanes& lanes, unsigned mask) { combine_mma<F16>(lanes, mask); }
void combine_mma_u8s8(Lanes& lanes, unsigned mask) { combine_mma<U8S8>(lanes, mask); }

} // namespace metrale::host
