#include "counter.h"

#include <algorithm>

namespace goal {

namespace {

constexpr std::size_t kFirstSlots = 1024;

}  // namespace

Counter::Counter(std::size_t capacity) : capacity_(capacity) { rebuild(kFirstSlots); }

void Counter::rebuild(std::size_t slots) {
    std::vector<Slot> old(slots, Slot{0.0, 0});
    old.swap(slots_);
    hash_shift_ = 64;
    for (std::size_t size = slots; size > 1; size /= 2) --hash_shift_;
    used_ = 0;
    for (const Slot& entry : old) {
        if (entry.count == 0) continue;
        Slot* slot = find(entry.amount);
        if (slot->count == 0) {
            *slot = entry;
            ++used_;
        } else {
            slot->count += entry.count;
            slot->amount = std::min(slot->amount, entry.amount);
        }
    }
}

void Counter::grow() { rebuild(2 * slots_.size()); }

void Counter::coarsen() {
    while (used_ > capacity_) coarsen_to(dropped_bits_ + 1);
}

void Counter::coarsen_to(int bits) {
    if (bits <= dropped_bits_) return;
    dropped_bits_ = bits;
    rebuild(slots_.size());
}

void Counter::merge(const Counter& other) {
    coarsen_to(other.dropped_bits_);
    // The other table is read in hash order, which would pile up in a smaller one.
    if (slots_.size() < other.slots_.size()) rebuild(other.slots_.size());
    for (const Slot& slot : other.slots_) {
        if (slot.count != 0) add(slot.amount, slot.count);
    }
}

CountedAmounts Counter::sorted() const {
    std::vector<Slot> entries;
    entries.reserve(used_);
    for (const Slot& slot : slots_) {
        if (slot.count != 0) entries.push_back(slot);
    }
    std::sort(entries.begin(), entries.end(), [](const Slot& a, const Slot& b) { return a.amount < b.amount; });
    CountedAmounts counted;
    counted.amounts.reserve(entries.size());
    counted.counts.reserve(entries.size());
    for (const Slot& entry : entries) {
        counted.amounts.push_back(entry.amount);
        counted.counts.push_back(entry.count);
    }
    return counted;
}

}  // namespace goal
