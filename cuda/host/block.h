// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Runs the threads of one block on the calling operating system thread.
#pragma once

#include "abi.h"
#include "builtins.h"
#include "fiber.h"
#include "meetings.h"

#include <pthread.h>
#include <random>
#include <string>
#include <vector>

namespace metrale::host {

struct Launch {
    const metrale_host_kernel& kernel;
    const metrale_host_config& config;
    void** args;
};

struct Thread {
    enum class State : uint8_t { asleep, exited, other }; // other: not begun, running or ready

    uint3 index;
    unsigned rank; // x + y * width + z * width * height
    State state;
    bool in_block_meeting;
    const Site* site; // where it sleeps
    Stack* stack;
    Thread* next;
};

// Threads in order of arrival, linked through themselves.
struct Queue {
    Thread *first = nullptr, *last = nullptr;

    void push(Thread& thread) {
        thread.next = nullptr;
        (first ? last->next : first) = &thread;
        last = &thread;
    }
    Thread& pop() {
        Thread& thread = *first;
        first = thread.next;
        return thread;
    }
    void splice(Queue& other) {
        if (other.first) {
            (first ? last->next : first) = other.first;
            last = other.last;
            other.first = nullptr;
        }
    }
};

struct Meeting {
    const Site* site; // the first arriver's
    Combine combine;
    unsigned mask, arrived;
    bool exits_count;
    Queue sleepers;
};

struct Warp {
    Lanes lanes;
    unsigned absent; // lanes past the end of the block
    unsigned exited; // these among them
    unsigned n_open;
    Meeting open[kWarp]; // masks of meetings may overlap: some lanes can meet while the others wait for them
};

// A worker keeps its stacks and shared memory from block to block. Threads run one at a time: a thread that
// sleeps hands over to the first that is ready, else to the first that has not begun. Threads that have not
// begun run as calls on one stack, which stays with a thread only when it sleeps: a kernel without barriers
// switches once a block.
class Worker {
public:
    Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker();

    void prepare(const Launch& launch);
    // False if the block failed; then error() says how.
    bool run_block(uint3 block, uint64_t number);
    const std::string& error() const { return error_; }

    // For a running thread.
    unsigned lane() const { return current_->rank % kWarp; }
    void* shared() const { return shared_; }
    int meet_block(const Site& site, Vote vote, int predicate);
    uint64_t meet_warp(const Site& site, unsigned mask, Combine combine, uint64_t value, unsigned source,
                       bool exits_count);
    [[noreturn]] void fail(const std::string& what);
    [[noreturn]] void fail_at(const Site& site, const std::string& what);

    // At a fault, as a signal handler may ask: whether it is this worker's running thread, out of stack.
    bool out_of_stack(const void* address) const {
        return stack_ && pthread_equal(system_thread_, pthread_self()) &&
               StackPool::past_end(*stack_, address);
    }

private:
    static void run_stack();
    void begin(Thread& thread);
    void exit(Thread& thread);
    void sleep(const Site& site);
    void wake(Thread& thread);
    void close_block_meeting();
    void close_warp_meeting(Warp& warp, unsigned slot);
    unsigned expected() const { return launch_->config.strict ? threads_.size() : live_; }
    bool complete(const Warp& warp, const Meeting& meeting) const;
    Warp& warp_of(const Thread& thread) { return warps_[thread.rank / kWarp]; }

    std::string locate(const Thread& thread) const;
    std::string absentee(unsigned rank) const;
    std::string explain_deadlock();

    const Launch* launch_ = nullptr;
    StackPool stacks_;
    Stack main_;
    Stack* stack_ = nullptr; // the running thread's; none between blocks
    pthread_t system_thread_{};
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<unsigned> sequence_; // ranks in the order they begin
    std::mt19937_64 random_;
    void* shared_ = nullptr;
    size_t shared_bytes_ = 0;
    std::string error_;

    Thread* current_ = nullptr;
    Queue ready_;
    unsigned begun_ = 0, live_ = 0;

    struct {
        const Site* site;
        unsigned arrived, votes;
        Vote vote;
        Queue sleepers;
        int result;
    } meeting_{};
};

} // namespace metrale::host
