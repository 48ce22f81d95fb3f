// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Stacks, and the switch between them.
#pragma once

#include <cstddef>
#include <vector>

#if !defined(__x86_64__) || defined(METRALE_UCONTEXT)
#define METRALE_UCONTEXT_SWITCH 1
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define METRALE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METRALE_ASAN 1
#endif
#endif

namespace metrale::host {

// Twice what CUDA grants a thread in local memory. It is address space: pages come with their first use.
inline constexpr size_t kStackBytes = 1 << 20;

// A place to run: a pooled stack, or (with no memory of its own) the operating system thread's.
struct Stack {
#ifdef METRALE_UCONTEXT_SWITCH
    ucontext_t context;
#else
    void* pointer = nullptr;
#endif
    char* memory = nullptr;
    size_t bytes = 0;
    void* sanitizer = nullptr; // the address sanitizer's own state while the stack sleeps
};

// Sleeps on `from` and wakes `to`; returns when someone switches back to `from`.
void switch_stack(Stack& from, Stack& to);

// Stacks that each begin in `entry` when first switched to. Of one operating system thread at a time.
class StackPool {
public:
    explicit StackPool(void (*entry)()) : entry_(entry) {}
    StackPool(const StackPool&) = delete;
    StackPool& operator=(const StackPool&) = delete;
    ~StackPool();

    Stack& take();
    void give(Stack& stack) { free_.push_back(&stack); }
    // Whether an address is in the guard that lies past the end of a stack.
    static bool past_end(const Stack& stack, const void* address);
    // The first thing that `entry` calls.
    static void enter();
    // Takes every stack back, whatever slept on it, to begin anew.
    void reclaim();

private:
    void grow();
    void rewind(Stack& stack, size_t number);

    void (*entry_)();
    std::vector<Stack*> free_, all_;
    std::vector<char*> chunks_;
};

} // namespace metrale::host
