// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The C interface: checks a launch, and spreads its blocks over operating system threads.
#include "abi.h"
#include "block.h"
#include "overflow.h"
#include "registry.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <pthread.h>
#include <thread>

namespace metrale::host {
namespace {

constexpr uint32_t kMaxBlock[3] = {METRALE_MAX_BLOCK_X, METRALE_MAX_BLOCK_Y, METRALE_MAX_BLOCK_Z};
constexpr uint32_t kMaxGrid[3] = {METRALE_MAX_GRID_X, METRALE_MAX_GRID_Y, METRALE_MAX_GRID_Z};
#ifdef METRALE_STATIC_SHARED
constexpr uint32_t kMaxWorkers = 1;
#else
// A guarded stack is two of the 65,530 mappings that Linux allows a process, and a worker may need 1024
// stacks.
constexpr uint32_t kMaxWorkers = 24;
#endif
// A grid of fewer threads is over before a sleeping worker is up.
constexpr uint64_t kThreadsWorthHelp = 4096;

std::vector<metrale_host_kernel>& registry() {
    static std::vector<metrale_host_kernel> kernels;
    return kernels;
}

// A grid on its way. Blocks are claimed by position, in order, so that every block before a failed one is
// run, and the failure told is the first one's, whoever ran it.
class Grid {
public:
    explicit Grid(const Launch& launch) : launch_(launch) {
        const metrale_host_config& config = launch.config;
        count_ = uint64_t{config.grid[0]} * config.grid[1] * config.grid[2];
        failed_ = count_;
        if (config.order == METRALE_SHUFFLED)
            for (step_ = config.seed % count_ | 1; std::gcd(step_, count_) != 1;)
                step_ += 2;
    }

    uint64_t count() const { return count_; }
    const std::string& error() const { return error_; }

    void run(Worker& worker) noexcept {
        std::string error;
        uint64_t position = 0;
        SignalStack signals;
        try {
            worker.prepare(launch_);
            while ((position = next_++) < failed_.load(std::memory_order_relaxed)) {
                const uint64_t number = block_at(position);
                const uint32_t* grid = launch_.config.grid;
                const uint3 block = {static_cast<unsigned>(number % grid[0]),
                                     static_cast<unsigned>(number / grid[0] % grid[1]),
                                     static_cast<unsigned>(number / grid[0] / grid[1])};
                if (!worker.run_block(block, number)) {
                    error = worker.error();
                    break;
                }
            }
        } catch (const std::bad_alloc&) {
            error =
                "kernel " + std::string(launch_.kernel.name) + ": out of memory for stacks or shared memory";
        }
        if (error.empty())
            return;
        std::lock_guard lock(mutex_);
        if (error_.empty() || position < failed_) {
            error_ = std::move(error);
            failed_ = position;
        }
    }

private:
    uint64_t block_at(uint64_t position) const {
        switch (launch_.config.order) {
        case METRALE_REVERSED:
            return count_ - 1 - position;
        case METRALE_SHUFFLED: // a step coprime with the count visits every block once
            return static_cast<uint64_t>(static_cast<unsigned __int128>(position) * step_ % count_);
        default:
            return position;
        }
    }

    const Launch& launch_;
    uint64_t count_ = 0, step_ = 1;
    std::atomic<uint64_t> next_{0}, failed_;
    std::mutex mutex_;
    std::string error_;
};

// Threads that help one launch at a time; others do without. It is never destroyed: its threads sleep in it
// until the process ends. A forked child, which has none of them, gets another.
class Helpers {
public:
    static Helpers& instance() {
        std::lock_guard lock(current_mutex_);
        if (!current_)
            current_ = new Helpers;
        return *current_;
    }

    // Around a fork, which no thread of the child may find amidst instance().
    static void before_fork() { current_mutex_.lock(); }
    static void after_fork(bool in_child) {
        if (in_child)
            current_ = nullptr;
        current_mutex_.unlock();
    }

    std::unique_lock<std::mutex> try_hire() { return std::unique_lock(hired_, std::try_to_lock); }

    void start(Grid& grid, uint32_t count) {
        std::lock_guard lock(mutex_);
        for (; n_threads_ < count; ++n_threads_)
            std::thread([this] { work(); }).detach();
        grid_ = &grid;
        vacancies_ = count;
        wake_.notify_all();
    }

    void finish() {
        std::unique_lock lock(mutex_);
        vacancies_ = 0; // whoever is not up yet need not come
        idle_.wait(lock, [this] { return running_ == 0; });
    }

private:
    [[noreturn]] void work() {
        Worker worker;
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return vacancies_ > 0; });
            --vacancies_;
            ++running_;
            Grid& grid = *grid_;
            lock.unlock();
            grid.run(worker);
            lock.lock();
            if (--running_ == 0)
                idle_.notify_one();
        }
    }

    inline static Helpers* current_ = nullptr;
    inline static std::mutex current_mutex_;

    std::mutex hired_, mutex_;
    std::condition_variable wake_, idle_;
    Grid* grid_ = nullptr;
    uint32_t n_threads_ = 0, vacancies_ = 0, running_ = 0;
};

// Workers of the launching threads, kept from launch to launch.
class Bench {
public:
    static Bench& instance() {
        static Bench& bench = *new Bench;
        return bench;
    }
    std::unique_ptr<Worker> take() {
        std::lock_guard lock(mutex_);
        if (idle_.empty())
            return std::make_unique<Worker>();
        auto worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
    }
    void give(std::unique_ptr<Worker> worker) {
        std::lock_guard lock(mutex_);
        idle_.push_back(std::move(worker));
    }
    void before_fork() { mutex_.lock(); }
    void after_fork() { mutex_.unlock(); }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> idle_;
};

// A forked child has the locks as they were, and not the threads that held them.
void keep_locks_over_forks() {
    static const int registered = pthread_atfork(
        [] {
            Helpers::before_fork();
            Bench::instance().before_fork();
        },
        [] {
            Bench::instance().after_fork();
            Helpers::after_fork(false);
        },
        [] {
            Bench::instance().after_fork();
            Helpers::after_fork(true);
        });
    (void)registered;
}

std::string extent(const uint32_t (&v)[3]) {
    return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")";
}

// What is wrong with a launch, or nothing.
std::string refuse(const metrale_host_config& config) {
    const auto out_of_range = [](const uint32_t (&v)[3], const uint32_t (&limit)[3]) {
        return !v[0] || !v[1] || !v[2] || v[0] > limit[0] || v[1] > limit[1] || v[2] > limit[2];
    };
    if (out_of_range(config.grid, kMaxGrid))
        return "the grid " + extent(config.grid) + " is outside 1 to " + extent(kMaxGrid);
    if (out_of_range(config.block, kMaxBlock))
        return "the block " + extent(config.block) + " is outside 1 to " + extent(kMaxBlock);
    const uint64_t threads = uint64_t{config.block[0]} * config.block[1] * config.block[2];
    if (threads > METRALE_MAX_THREADS)
        return "the block " + extent(config.block) + " has " + std::to_string(threads) +
               " threads, over the limit of " + std::to_string(METRALE_MAX_THREADS);
    if (config.shared_bytes > METRALE_MAX_SHARED_BYTES)
        return std::to_string(config.shared_bytes) + " bytes of shared memory are over the limit of " +
               std::to_string(METRALE_MAX_SHARED_BYTES);
    if (config.order < METRALE_FORWARD || config.order > METRALE_SHUFFLED)
        return "there is no thread order " + std::to_string(config.order);
    return {};
}

std::string launch(const Launch& launch) {
    const metrale_host_config& config = launch.config;
    if (std::string refusal = refuse(config); !refusal.empty())
        return "kernel " + std::string(launch.kernel.name) + ": " + refusal;

#ifdef METRALE_STATIC_SHARED
    static std::mutex globals;
    std::lock_guard one_launch(globals);
#endif
    static const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    Grid grid(launch);
    uint64_t workers =
        std::min<uint64_t>({config.workers ? config.workers : cores, kMaxWorkers, grid.count()});
    if (grid.count() * config.block[0] * config.block[1] * config.block[2] < kThreadsWorthHelp)
        workers = 1;

    keep_locks_over_forks();
    std::unique_ptr<Worker> worker = Bench::instance().take();
    std::unique_lock<std::mutex> hired;
    if (workers > 1)
        hired = Helpers::instance().try_hire();
    if (hired)
        Helpers::instance().start(grid, static_cast<uint32_t>(workers - 1));
    grid.run(*worker);
    if (hired)
        Helpers::instance().finish();
    Bench::instance().give(std::move(worker));
    return grid.error();
}

} // namespace

Registrar::Registrar(std::initializer_list<metrale_host_kernel> kernels) {
    registry().insert(registry().end(), kernels);
}

} // namespace metrale::host

const metrale_host_kernel* metrale_host_kernels(size_t* count) {
    const auto& kernels = metrale::host::registry();
    *count = kernels.size();
    return kernels.data();
}

int metrale_host_launch(const metrale_host_kernel* kernel, const metrale_host_config* config, void** args,
                        char* message, size_t message_bytes) {
    std::string error;
    try {
        error = metrale::host::launch({*kernel, *config, args});
    } catch (const std::exception& exception) {
        error = "kernel " + std::string(kernel->name) + ": " + exception.what();
    }
    if (message_bytes)
        std::snprintf(message, message_bytes, "%s", error.c_str());
    return error.empty() ? 0 : 1;
}
