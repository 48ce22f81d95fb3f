// SPDX-License-Identifier: MIT OR Apache-2.0
#include "fiber.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#ifdef METRALE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace metrale::host {
namespace {

constexpr size_t kChunkStacks = 32;
// Tops at one offset in their pages would share a few cache sets.
constexpr size_t kColours = 61, kColourBytes = 192;

size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t slot_bytes() { return page_bytes() + kStackBytes; }

#ifdef METRALE_ASAN
__thread Stack* left; // the stack that was switched away from last

// Tells the sanitizer that a switch is over, and learns from it where the stack that was left lies: of the
// operating system thread's own stack nobody else says so.
void arrive(void* sanitizer) {
    const void* memory;
    __sanitizer_finish_switch_fiber(sanitizer, &memory, &left->bytes);
    left->memory = static_cast<char*>(const_cast<void*>(memory));
}
#else
void arrive(void*) {}
#endif

} // namespace

#ifndef METRALE_UCONTEXT_SWITCH
// Keeps what the System V ABI asks a callee to keep, but for the floating-point control words, which kernels
// do not change.
extern "C" void metrale_switch_stack(void** from, void* to);
__asm__(R"(
    .pushsection .text
    .p2align 4
    .hidden metrale_switch_stack
    .globl metrale_switch_stack
    .type metrale_switch_stack, @function
metrale_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size metrale_switch_stack, . - metrale_switch_stack
    .popsection
)");
#endif

void switch_stack(Stack& from, Stack& to) {
#ifdef METRALE_ASAN
    left = &from;
    __sanitizer_start_switch_fiber(&from.sanitizer, to.memory, to.bytes);
#endif
#ifdef METRALE_UCONTEXT_SWITCH
    swapcontext(&from.context, &to.context);
#else
    metrale_switch_stack(&from.pointer, to.pointer);
#endif
    arrive(from.sanitizer);
}

void StackPool::enter() { arrive(nullptr); }

bool StackPool::past_end(const Stack& stack, const void* address) {
    return address >= stack.memory - page_bytes() && address < stack.memory;
}

StackPool::~StackPool() {
    for (char* chunk : chunks_)
        munmap(chunk, kChunkStacks * slot_bytes());
    for (Stack* stack : all_)
        delete stack;
}

Stack& StackPool::take() {
    if (free_.empty())
        grow();
    Stack& stack = *free_.back();
    free_.pop_back();
    return stack;
}

void StackPool::grow() {
    void* memory = mmap(nullptr, kChunkStacks * slot_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        throw std::bad_alloc();
    char* chunk = static_cast<char*>(memory);
    chunks_.push_back(chunk);
    for (size_t i = kChunkStacks; i-- > 0;) {
        char* slot = chunk + i * slot_bytes();
        mprotect(slot, page_bytes(), PROT_NONE); // the guard; stacks grow down to it
        Stack* stack = new Stack;
        stack->memory = slot + page_bytes();
        stack->bytes = kStackBytes;
        all_.push_back(stack);
        rewind(*stack, all_.size());
        free_.push_back(stack);
    }
}

void StackPool::rewind(Stack& stack, size_t number) {
#ifdef METRALE_ASAN
    __asan_unpoison_memory_region(stack.memory, stack.bytes);
#endif
    const size_t usable = stack.bytes - number % kColours * kColourBytes;
#ifdef METRALE_UCONTEXT_SWITCH
    getcontext(&stack.context);
    stack.context.uc_stack.ss_sp = stack.memory;
    stack.context.uc_stack.ss_size = usable;
    stack.context.uc_link = nullptr;
    makecontext(&stack.context, entry_, 0);
#else
    // What the switch takes: six registers, and where it returns to. The zero above is where `entry` would
    // return to; it ends a debugger's walk, and leaves the stack pointer 8 modulo 16, as a call does.
    auto* top = reinterpret_cast<uintptr_t*>(stack.memory + usable) - 8;
    std::fill_n(top, 8, 0);
    top[6] = reinterpret_cast<uintptr_t>(entry_);
    stack.pointer = top;
#endif
}

void StackPool::reclaim() {
    free_.clear();
    for (size_t i = all_.size(); i-- > 0;) {
        rewind(*all_[i], i);
        free_.push_back(all_[i]);
    }
}

} // namespace metrale::host
