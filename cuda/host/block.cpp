// SPDX-License-Identifier: MIT OR Apache-2.0
#include "block.h"

#include "overflow.h"
#include "shared.h"

#include <cstdlib>
#include <exception>
#include <new>
#include <utility>

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace metrale::host {
namespace {

__thread Worker* worker; // of this operating system thread, while it runs a block

constexpr size_t kSharedAlignment = 128;
// Not a number or -1; huge; tiny and negative: what one reduction swallows, another order's fill shows.
constexpr uint8_t kFill[] = {0xff, 0x7f, 0xa5};

} // namespace

unsigned lane_index() { return worker->lane(); }
void* dynamic_shared() { return worker->shared(); }
void fail(const char* what) { worker->fail(what); }
void fail_at(const Site& site, const char* what) { worker->fail_at(site, what); }
int meet_block(const Site& site, Vote vote, int predicate) {
    return worker->meet_block(site, vote, predicate);
}
uint64_t meet_warp(const Site& site, unsigned mask, Combine combine, uint64_t value, unsigned source,
                   bool exits_count) {
    return worker->meet_warp(site, mask, combine, value, source, exits_count);
}

Worker::Worker() : stacks_(run_stack) { catch_overflows(*this); }
Worker::~Worker() { std::free(shared_); }

void Worker::prepare(const Launch& launch) {
    launch_ = &launch;
    const metrale_host_config& config = launch.config;
    const uint32_t* extent = config.block;
    const unsigned count = extent[0] * extent[1] * extent[2];
    threads_.resize(count);
    warps_.resize((count + kWarp - 1) / kWarp);
    sequence_.resize(count);
    for (unsigned rank = 0; rank < count; ++rank) {
        threads_[rank].rank = rank;
        threads_[rank].index = {rank % extent[0], rank / extent[0] % extent[1], rank / extent[0] / extent[1]};
        sequence_[rank] = config.order == METRALE_REVERSED ? count - 1 - rank : rank;
    }
    if (!shared_ || shared_bytes_ != config.shared_bytes) {
        std::free(shared_);
        shared_ = nullptr;
        shared_bytes_ = config.shared_bytes;
        // Exactly the size, so that the address sanitizer sees an overrun.
        if (posix_memalign(&shared_, kSharedAlignment, shared_bytes_))
            throw std::bad_alloc();
    }
}

bool Worker::run_block(uint3 block, uint64_t number) {
    const metrale_host_config& config = launch_->config;
    const unsigned count = static_cast<unsigned>(threads_.size());
    fill_static_shared(kFill[config.order]);
    std::memset(shared_, kFill[config.order], shared_bytes_);
    worker = this;
    system_thread_ = pthread_self();
    gridDim = {config.grid[0], config.grid[1], config.grid[2]};
    blockDim = {config.block[0], config.block[1], config.block[2]};
    blockIdx = block;

    if (config.order == METRALE_SHUFFLED) {
        random_.seed(config.seed ^ number * 0x9e3779b97f4a7c15u);
        for (unsigned i = count; i > 1; --i)
            std::swap(sequence_[i - 1], sequence_[random_() % i]);
    }
    for (Thread& thread : threads_)
        thread.state = Thread::State::other;
    for (Warp& warp : warps_)
        warp.absent = warp.exited = warp.n_open = 0;
    if (count % kWarp)
        warps_.back().absent = warps_.back().exited = kAllLanes << count % kWarp;
    begun_ = 0;
    live_ = count;
    ready_ = {};
    meeting_ = {};
    error_.clear();

    stack_ = &stacks_.take();
    switch_stack(main_, *stack_);
    worker = nullptr;
    stack_ = nullptr;
    if (error_.empty())
        return true;
    stacks_.reclaim();
    return false;
}

// Where every stack begins, and where it comes back to when no thread sleeps on it any more.
void Worker::run_stack() {
    Worker& self = *worker;
    StackPool::enter();
    for (;;) {
        while (!self.ready_.first && self.begun_ < self.threads_.size())
            self.begin(self.threads_[self.sequence_[self.begun_++]]);
        Stack& mine = *self.stack_;
        self.stacks_.give(mine);
        if (self.ready_.first) {
            Thread& thread = self.ready_.pop();
            self.wake(thread);
            switch_stack(mine, *thread.stack);
        } else {
            if (self.live_)
                self.error_ = self.explain_deadlock();
            switch_stack(mine, self.main_);
        }
    }
}

void Worker::begin(Thread& thread) {
    current_ = &thread;
    threadIdx = thread.index;
    try {
        launch_->kernel.invoke(launch_->kernel.function, launch_->args);
    } catch (const std::exception& exception) {
        error_ = std::string("threw: ") + exception.what();
    } catch (...) {
        error_ = "threw an exception";
    }
    if (!error_.empty()) // not in the handler, which must come to its end
        fail(std::exchange(error_, {}));
    exit(*current_);
}

void Worker::exit(Thread& thread) {
    thread.state = Thread::State::exited;
    --live_;
    Warp& warp = warp_of(thread);
    warp.exited |= 1u << thread.rank % kWarp;
    if (meeting_.arrived && meeting_.arrived == expected())
        close_block_meeting();
    for (unsigned slot = warp.n_open; slot-- > 0;)
        if (complete(warp, warp.open[slot]))
            close_warp_meeting(warp, slot);
}

// Makes a ready thread the running one; the caller switches to its stack.
void Worker::wake(Thread& thread) {
    thread.state = Thread::State::other;
    current_ = &thread;
    threadIdx = thread.index;
    stack_ = thread.stack;
}

// The running thread hands over until someone wakes it.
void Worker::sleep(const Site& site) {
    Thread& self = *current_;
    self.site = &site;
    self.stack = stack_;
    self.state = Thread::State::asleep;
    if (ready_.first) {
        Thread& thread = ready_.pop();
        wake(thread);
        if (&thread != &self)
            switch_stack(*self.stack, *thread.stack);
    } else if (begun_ < threads_.size()) {
        stack_ = &stacks_.take();
        switch_stack(*self.stack, *stack_);
    } else {
        error_ = explain_deadlock();
        switch_stack(*self.stack, main_);
    }
}

void Worker::fail(const std::string& what) {
    error_ = locate(*current_) + " " + what;
    switch_stack(*stack_, main_);
    __builtin_unreachable();
}

} // namespace metrale::host
