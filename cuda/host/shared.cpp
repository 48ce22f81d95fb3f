// SPDX-License-Identifier: MIT OR Apache-2.0
#include "shared.h"

#ifdef METRALE_STATIC_SHARED

// Globals lie among the library's other data: they keep what the last block left.
void metrale::host::fill_static_shared(uint8_t) {}

#else

#include <cstddef>
#include <cstring>
#include <link.h>

namespace metrale::host {
namespace {

__thread char anchor; // at the same offset of every thread's block

struct Extent {
    ptrdiff_t offset = 0; // of the block's begin from the anchor
    size_t bytes = 0;
};

// Called for each loaded object: takes the one that this function is in.
int measure(dl_phdr_info* object, size_t, void* result) {
    const auto here = reinterpret_cast<ElfW(Addr)>(&measure);
    const ElfW(Phdr)* tls = nullptr;
    bool ours = false;
    for (int i = 0; i < object->dlpi_phnum; ++i) {
        const ElfW(Phdr) & header = object->dlpi_phdr[i];
        const ElfW(Addr) begin = object->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_TLS)
            tls = &header;
        else if (header.p_type == PT_LOAD && here >= begin && here < begin + header.p_memsz)
            ours = true;
    }
    if (!ours || !tls)
        return 0;
    *static_cast<Extent*>(result) = {static_cast<char*>(object->dlpi_tls_data) - &anchor, tls->p_memsz};
    return 1;
}

Extent find_block() {
    anchor = 1; // the thread's block is made at its first use
    Extent extent;
    dl_iterate_phdr(measure, &extent);
    return extent;
}

} // namespace

void fill_static_shared(uint8_t pattern) {
    static const Extent extent = find_block();
    char* block = &anchor;
    __asm__(
        ""
        : "+r"(block)); // from here on no longer one char to a compiler that checks bounds (_FORTIFY_SOURCE)
    std::memset(block + extent.offset, pattern, extent.bytes);
}

} // namespace metrale::host

#endif
