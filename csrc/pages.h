// Memory for large results, used again by the next one.
//
// A fresh result of hundreds of megabytes spends more time in page faults, which clear every page, than it takes to
// write. The pages of the last one that was dropped are therefore kept, marked with MADV_FREE: the kernel may take them
// back whenever it is short of memory, and until then the next result finds them in place.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace goal {

class Pages {
public:
    // Results from here on are worth it; below, malloc keeps what is freed.
    static constexpr std::size_t kLeast = std::size_t{32} << 20;

    // At least `bytes` of memory with any content; empty where the system grants none, or is not Linux.
    static Pages take(std::size_t bytes) {
        {
            const std::lock_guard<std::mutex> lock(mutex());
            // Not for a result of a fraction of its size: the rest would stay out of reach for as long as that one lives.
            if (kept().bytes_ >= bytes && kept().bytes_ / 2 <= bytes) return std::exchange(kept(), Pages());
        }
        Pages pages;
#if defined(__linux__)
        void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return pages;
        madvise(data, bytes, MADV_HUGEPAGE);  // a kernel without huge pages says no, which changes nothing
        pages.data_ = data;
        pages.bytes_ = bytes;
#endif
        return pages;
    }

    // Keeps them for the next result, in place of those that were kept before.
    static void keep(Pages pages) {
#if defined(__linux__) && defined(MADV_FREE)
        if (madvise(pages.data_, pages.bytes_, MADV_FREE) != 0) return;
        const std::lock_guard<std::mutex> lock(mutex());
        std::swap(kept(), pages);
#endif
    }

    Pages() = default;
    Pages(Pages&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Pages& operator=(Pages&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Pages() {
#if defined(__linux__)
        if (data_ != nullptr) munmap(data_, bytes_);
#endif
    }

    void* data() const { return data_; }

private:
    // Never destroyed: an array may outlive the module's static objects.
    static Pages& kept() {
        static auto* pages = new Pages();
        return *pages;
    }
    static std::mutex& mutex() {
        static auto* lock = new std::mutex();
        return *lock;
    }

    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace goal
