// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include "common/math.cuh"

namespace metrale {

// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; no clamps for limit <= 0. The comparisons are
// written so that a NaN passes through.
__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return silu(gate) * up * weight;
}

} // namespace metrale
