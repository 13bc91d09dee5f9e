// Amounts gathered in chunks, on any number of machines, for one vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counter.h"
#include "vocabulary.h"

namespace goal {

class Accumulator {
public:
    // Keeps up to `capacity` distinct amounts; with no more than that it is exact. At least 2048.
    explicit Accumulator(std::size_t capacity);

    // Throws InvalidAmount and adds nothing where an entry is bad.
    template <typename Amount>
    void add(const Amount* amounts, std::size_t size);
    void merge(const Accumulator& other);  // of the same capacity

    // The same bytes for the same amounts, however they were split and in whatever order they came.
    std::string to_bytes() const;
    static Accumulator from_bytes(const std::string& bytes);

    std::vector<double> build(const VocabularyOptions& options) const;
    CountedAmounts counted() const { return counter_.sorted(); }

    std::uint64_t positives() const { return positives_; }
    std::uint64_t zeros() const { return zeros_; }
    std::size_t capacity() const { return counter_.capacity(); }
    std::size_t distinct() const { return counter_.distinct(); }
    int dropped_bits() const { return counter_.dropped_bits(); }

private:
    Counter counter_;
    std::uint64_t positives_ = 0;
    std::uint64_t zeros_ = 0;
    bool narrow_ = true;  // every chunk so far was float32
};

}  // namespace goal
