// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Atomics and fences: blocks run on several operating system threads, so these are the compiler's own.
#pragma once

#include <cstdint>
#include <type_traits>

namespace metrale::host {

// The general read-modify-write; returns the value before.
template <class T, class Operation>
T atomic_update(T* address, Operation operation) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do
        after = operation(before);
    while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

// Keeps the operand from deducing the type, so that atomicAdd(&word, 1) is of the word's type.
template <class T>
using operand = std::enable_if_t<std::is_arithmetic_v<T>, T>;

} // namespace metrale::host

template <class T>
T atomicAdd(T* address, metrale::host::operand<T> value) {
    if constexpr (std::is_integral_v<T>)
        return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
    else
        return metrale::host::atomic_update(address, [=](T before) { return before + value; });
}
template <class T>
T atomicSub(T* address, metrale::host::operand<T> value) {
    return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicAnd(T* address, metrale::host::operand<T> value) {
    return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* address, metrale::host::operand<T> value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicXor(T* address, metrale::host::operand<T> value) {
    return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMin(T* address, metrale::host::operand<T> value) {
    return metrale::host::atomic_update(address, [=](T before) { return value < before ? value : before; });
}
template <class T>
T atomicMax(T* address, metrale::host::operand<T> value) {
    return metrale::host::atomic_update(address, [=](T before) { return before < value ? value : before; });
}
template <class T>
T atomicExch(T* address, metrale::host::operand<T> value) {
    T before;
    __atomic_exchange(address, &value, &before, __ATOMIC_RELAXED);
    return before;
}
template <class T>
T atomicCAS(T* address, metrale::host::operand<T> expected, metrale::host::operand<T> value) {
    __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
