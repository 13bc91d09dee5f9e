// What the tokens chosen so far leave of each amount, in the three forms that Algorithm 1 can run on. Each offers
// size(), the number of non-zero residuals; at(index), the residual with `index` smaller ones (counted with
// repetition); and subtract(step), which takes step from every residual of at least step.
//
// Residuals of at most min_unit end the algorithm when a percentile falls on them, and are never subtracted from: all
// three forms keep only their number, and at() answers min_unit for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "amounts.h"
#include "counter.h"

namespace goal {

// Whole numbers of units: counts[k] residuals are k.
class DenseResiduals {
public:
    DenseResiduals(std::vector<std::uint64_t> counts, std::size_t min_unit);

    std::uint64_t size() const { return size_; }
    double at(std::uint64_t index) const;
    void subtract(double step);

private:
    std::size_t min_unit_;
    std::uint64_t size_ = 0;
    std::uint64_t dust_ = 0;
    std::vector<std::uint64_t> counts_;
};

// Distinct residuals with counts, ascending. Subtracting keeps both halves sorted, so a merge replaces the sort.
class CountedResiduals {
public:
    CountedResiduals(const CountedAmounts& counted, double min_unit);

    std::uint64_t size() const { return size_; }
    double at(std::uint64_t index) const;
    void subtract(double step);

private:
    using Entry = std::pair<double, std::uint64_t>;

    void add(std::vector<Entry>& entries, const Entry& entry);

    double min_unit_;
    std::uint64_t size_ = 0;
    std::uint64_t dust_ = 0;
    std::vector<Entry> entries_;
    std::vector<Entry> moved_;
    std::vector<Entry> merged_;
};

// Residuals in buckets of similar size, unordered within a bucket. A round touches only the buckets above its
// percentile, and needs no second copy: a bucket is a list of small blocks, and an emptied block is used again.
class BucketedResiduals {
public:
    // Up to `capacity` residuals in (min_unit, largest].
    BucketedResiduals(std::size_t capacity, double min_unit, double largest);

    void add(double residual) {  // at most `largest`
        if (residual <= min_unit_) {
            dust_ += residual > 0.0 ? 1 : 0;
            return;
        }
        Bucket& bucket = buckets_[bucket_of(residual)];
        if (bucket.end % kBlock == 0) extend(bucket);
        values_[bucket.end++] = residual;
        ++bucket.size;
    }
    void subtract(double step);

    std::uint64_t size() const;
    std::size_t buckets() const { return buckets_.size(); }
    std::uint64_t bucket_size(std::size_t bucket) const { return buckets_[bucket].size; }
    std::uint64_t bucket_floor(std::size_t bucket) const { return first_bits_ + (std::uint64_t{bucket} << shift_); }
    int bucket_bits() const { return shift_; }

    template <typename Visit>
    void for_each(std::size_t bucket, const Visit& visit) const {
        walk(buckets_[bucket], visit, [](std::size_t) {});
    }

private:
    static constexpr std::size_t kBlock = 64;
    static constexpr std::size_t kBuckets = 1024;

    struct Bucket {
        std::size_t end = 0;  // where the next value goes, in the block that was added last; a multiple of kBlock: nowhere
        std::uint64_t size = 0;
    };

    // Visits the values of a bucket, and each block of it once its values have been visited.
    template <typename Visit, typename Leave>
    void walk(Bucket bucket, const Visit& visit, const Leave& leave) const {
        while (bucket.size > 0) {
            const std::size_t block = (bucket.end - 1) / kBlock;
            const std::size_t begin = block * kBlock;
            for (std::size_t i = begin; i < bucket.end; ++i) visit(values_[i]);
            bucket.size -= bucket.end - begin;
            bucket.end = (std::size_t{previous_[block]} + 1) * kBlock;
            leave(block);
        }
    }

    std::size_t bucket_of(double residual) const { return (to_bits(residual) - first_bits_) >> shift_; }
    void extend(Bucket& bucket);

    double min_unit_;
    std::uint64_t first_bits_;
    int shift_ = 0;
    std::uint64_t dust_ = 0;
    std::unique_ptr<double[]> values_;  // uninitialised, so that memory is taken only as blocks are used
    std::unique_ptr<std::uint32_t[]> previous_;
    std::uint32_t used_blocks_ = 0;
    std::vector<std::uint32_t> free_blocks_;
    std::vector<Bucket> buckets_;
};

// Bucketed residuals in as many shards as there are threads; where they are split does not show in any result.
class ShardedResiduals {
public:
    ShardedResiduals(std::vector<BucketedResiduals> shards, double min_unit)
        : shards_(std::move(shards)), min_unit_(min_unit) {}

    std::uint64_t size() const;
    double at(std::uint64_t index) const;
    void subtract(double step);

private:
    double select(std::size_t bucket, std::uint64_t index) const;

    std::vector<BucketedResiduals> shards_;
    double min_unit_;
};

}  // namespace goal
