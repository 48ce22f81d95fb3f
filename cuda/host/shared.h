// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>

namespace metrale::host {

// Fills every thread-local variable of this library on the calling thread: the kernels' static shared memory,
// and the runtime's few variables, which the caller sets anew.
void fill_static_shared(uint8_t pattern);

} // namespace metrale::host
