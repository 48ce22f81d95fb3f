// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels of a library, each with what its C++ signature says of its parameters.
#pragma once

#include "abi.h"

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <utility>

namespace metrale::host {

template <class T>
constexpr uint8_t kind_of() {
    if (std::is_pointer_v<T>)
        return METRALE_PTR;
    if (std::is_integral_v<T>)
        return METRALE_INT;
    return std::is_floating_point_v<T> ? METRALE_FLOAT : METRALE_BYTES;
}

// The word that metrale/gpu/signatures.py has for a type.
template <class T>
constexpr std::string_view word_for() {
    if (kind_of<T>() == METRALE_PTR)
        return "ptr";
    if (kind_of<T>() == METRALE_FLOAT)
        return sizeof(T) == 4 ? "f32" : "f64";
    if (kind_of<T>() == METRALE_BYTES)
        return "bytes";
    constexpr std::string_view words[2][4] = {{"u8", "u16", "u32", "u64"}, {"i8", "i16", "i32", "i64"}};
    return words[std::is_signed_v<T>][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
}

template <class... A>
constexpr bool takes(void (*)(A...), std::initializer_list<std::string_view> words) {
    if (words.size() != sizeof...(A))
        return false;
    const std::string_view* word = words.begin();
    return ((*word++ == word_for<A>()) && ...);
}

// An argument lies at whatever address: not at one that an overaligned type could be read from in place.
template <class T>
T read(const void* argument) {
    alignas(T) unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, argument, sizeof(T));
    return *reinterpret_cast<T*>(bytes);
}

template <class... A, size_t... I>
void invoke(void (*function)(A...), void** args, std::index_sequence<I...>) {
    function(read<std::remove_cv_t<A>>(args[I])...);
}

template <class... A>
metrale_host_kernel describe(const char* module, const char* name, void (*function)(A...),
                             std::initializer_list<const char*> names) {
    auto* params = new metrale_param[sizeof...(A) + 1]; // for the life of the process, as the library is
    size_t i = 0;
    ((params[i] = {names.begin()[i], kind_of<A>(), kind_of<A>() == METRALE_INT && std::is_signed_v<A>,
                   sizeof(A)},
      ++i),
     ...);
    return {module,
            name,
            sizeof...(A),
            params,
            reinterpret_cast<void (*)()>(function),
            [](void (*erased)(), void** args) {
                invoke(reinterpret_cast<void (*)(A...)>(erased), args, std::index_sequence_for<A...>());
            }};
}

struct Registrar {
    explicit Registrar(std::initializer_list<metrale_host_kernel> kernels);
};

} // namespace metrale::host
