// Counts amounts in bounded memory, in a way that does not depend on their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amounts.h"

namespace goal {

inline std::uint64_t to_bits(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double from_bits(std::uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A hash table from positive amounts to counts. While there are at most `capacity` distinct ones it is exact. Beyond
// that it drops trailing bits of the mantissa, as few as it takes, and keeps the smallest amount seen of each cell.
// Which bits are dropped is a function of the set of amounts alone, because coarser cells are unions of finer ones:
// adding and merging are associative and commutative.
class Counter {
public:
    explicit Counter(std::size_t capacity);

    void add(double amount, std::uint64_t count) {
        if (2 * (used_ + 1) > slots_.size()) grow();
        Slot* slot = find(amount);
        if (slot->count == 0) {
            *slot = {amount, count};
            if (++used_ > capacity_) coarsen();
        } else {
            slot->count += count;
            if (amount < slot->amount) slot->amount = amount;
        }
    }
    void merge(const Counter& other);

    // Drops bits until at least `bits` are dropped; other.merge needs the coarser of two resolutions.
    void coarsen_to(int bits);

    std::size_t capacity() const { return capacity_; }
    std::size_t distinct() const { return used_; }
    int dropped_bits() const { return dropped_bits_; }
    CountedAmounts sorted() const;

private:
    struct Slot {
        double amount;
        std::uint64_t count;  // 0: the slot is free
    };

    Slot* find(double amount) {
        const std::uint64_t key = to_bits(amount) >> dropped_bits_;
        std::size_t index = (key * 0x9E3779B97F4A7C15ULL) >> hash_shift_;
        while (slots_[index].count != 0 && (to_bits(slots_[index].amount) >> dropped_bits_) != key) {
            index = (index + 1) & (slots_.size() - 1);
        }
        return &slots_[index];
    }
    void grow();
    void coarsen();
    void rebuild(std::size_t slots);

    std::size_t capacity_;
    std::size_t used_ = 0;
    int dropped_bits_ = 0;
    int hash_shift_ = 0;
    std::vector<Slot> slots_;
};

}  // namespace goal
