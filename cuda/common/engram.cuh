// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Row ids of the engram tables from the compressed ids of the last tokens, for the device and the host:
//
//     roll = tok_0 * m_0 ^ tok_1 * m_1 ^ ... ^ tok_(n-1) * m_(n-1)     64-bit, signed, wrapping
//     id   = roll mod prime + offset                                   the modulus not negative
//
// tok_j lies j tokens back. From the first j that lies before the start or is unmapped (-1) on, all are the
// pad's.
#pragma once

#include "common/math.cuh"

namespace metrale {

METRALE_BOTH int64_t engram_roll(const int32_t* compressed, uint64_t position, uint32_t n,
                                 const uint64_t* multipliers, int32_t pad) {
    uint64_t roll = 0;
    bool known = true;
    for (uint32_t j = 0; j < n; ++j) {
        known = known && j <= position && compressed[position - j] >= 0;
        const int32_t token = known ? compressed[position - j] : pad;
        roll ^= static_cast<uint64_t>(token) * multipliers[j];
    }
    return static_cast<int64_t>(roll);
}

METRALE_BOTH int64_t engram_id(int64_t roll, int64_t prime, int64_t offset) {
    const int64_t rest = roll % prime;
    return (rest < 0 ? rest + prime : rest) + offset;
}

} // namespace metrale
