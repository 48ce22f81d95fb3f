// SPDX-License-Identifier: MIT OR Apache-2.0
#include "overflow.h"

#include "block.h"

#include <atomic>

namespace metrale::host {
namespace {

// Whom a fault may concern. A list that only grows can be read in a signal handler; a thread-local variable
// might be made there, with an allocation.
struct Watched {
    Worker& worker;
    Watched* next;
};
std::atomic<Watched*> watched{nullptr};
struct sigaction before;

void on_fault(int signal, siginfo_t* info, void* context) {
    for (Watched* at = watched.load(); at; at = at->next)
        if (at->worker.out_of_stack(info->si_addr))
            // Leaves for the worker's own stack. The kernel's frames are given up, as with every failure;
            // what they may hold, a lock of malloc's say, is not: a risk that beats the end of the process.
            at->worker.fail("ran out of stack: its local arrays or its recursion need more than " +
                            std::to_string(kStackBytes >> 10) + " KiB");
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(signal);
    else
        sigaction(signal, &before, nullptr); // and the instruction faults again
}

} // namespace

#ifdef METRALE_ASAN // which tells itself

void catch_overflows(Worker&) {}
SignalStack::SignalStack() : set_(false) {}

#else

void catch_overflows(Worker& worker) {
    static const bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        // A handler that does not return must not leave its signal blocked.
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        return sigaction(SIGSEGV, &action, &before) == 0;
    }();
    (void)installed;
    auto* entry = new Watched{worker, watched.load()};
    while (!watched.compare_exchange_weak(entry->next, entry)) {
    }
}

SignalStack::SignalStack() {
    stack_t mine = {};
    mine.ss_sp = memory_;
    mine.ss_size = sizeof(memory_);
    set_ = sigaltstack(&mine, &before_) == 0;
}

#endif

SignalStack::~SignalStack() {
    if (set_)
        sigaltstack(&before_, nullptr);
}

} // namespace metrale::host
