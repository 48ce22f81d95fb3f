// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A thread that runs out of stack is an error of its launch, as it would be on a GPU, and not the process's
// end.
#pragma once

#include <csignal>

namespace metrale::host {

class Worker;

// From now on the faults of this worker's threads at the end of their stacks are told. A worker lives as long
// as the process.
void catch_overflows(Worker& worker);

// Gives the calling operating system thread a stack for signal handlers: there is no room on the one that
// ends.
class SignalStack {
public:
    SignalStack();
    SignalStack(const SignalStack&) = delete;
    SignalStack& operator=(const SignalStack&) = delete;
    ~SignalStack();

private:
    stack_t before_;
    bool set_;
    char memory_[32 << 10];
};

} // namespace metrale::host
