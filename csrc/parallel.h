// Splits a range over threads; the pieces do not depend on timing, so neither do results that are merged in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace goal {

// Calls body(begin, end, worker) on `workers` consecutive pieces of [0, size). The first exception by worker is rethrown.
template <typename Body>
void parallel_for(std::size_t size, std::size_t workers, const Body& body) {
    workers = std::max<std::size_t>(1, workers);
    std::vector<std::exception_ptr> errors(workers);
    const auto run = [&](std::size_t worker) {
        try {
            const std::size_t share = size / workers;
            const std::size_t extra = size % workers;
            const std::size_t begin = worker * share + std::min(worker, extra);
            body(begin, begin + share + (worker < extra ? 1 : 0), worker);
        } catch (...) {
            errors[worker] = std::current_exception();
        }
    };
    std::vector<std::thread> pool;
    pool.reserve(workers - 1);
    for (std::size_t worker = 1; worker < workers; ++worker) {
        try {
            pool.emplace_back(run, worker);
        } catch (const std::system_error&) {
            run(worker);  // the system grants no more threads: the work still has to be done
        }
    }
    run(0);
    for (std::thread& thread : pool) thread.join();
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

// Threads worth starting for `size` elements: a thread costs about as much as a few ten thousand of them.
inline std::size_t worthwhile_workers(std::size_t size, int threads) {
    constexpr std::size_t kGrain = std::size_t{1} << 16;
    return std::max<std::size_t>(1, std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), size / kGrain));
}

}  // namespace goal
