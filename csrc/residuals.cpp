#include "residuals.h"

#include <algorithm>
#include <array>

#include "parallel.h"

namespace goal {

DenseResiduals::DenseResiduals(std::vector<std::uint64_t> counts, std::size_t min_unit)
    : min_unit_(min_unit), counts_(std::move(counts)) {
    for (std::size_t k = 1; k < counts_.size(); ++k) {
        size_ += counts_[k];
        if (k <= min_unit_) dust_ += counts_[k];
    }
}

double DenseResiduals::at(std::uint64_t index) const {
    std::uint64_t below = size_;
    for (std::size_t k = counts_.size(); k-- > min_unit_ + 1;) {
        below -= counts_[k];
        if (index >= below) return static_cast<double>(k);
    }
    return static_cast<double>(min_unit_);
}

void DenseResiduals::subtract(double step) {
    const std::size_t shift = static_cast<std::size_t>(step);
    // Ascending, so that a residual which is still at least step afterwards is not met a second time.
    for (std::size_t k = shift; k < counts_.size(); ++k) {
        const std::uint64_t count = counts_[k];
        if (count == 0) continue;
        counts_[k] = 0;
        if (k == shift) {
            size_ -= count;
        } else if (k - shift <= min_unit_) {
            dust_ += count;
        } else {
            counts_[k - shift] += count;
        }
    }
    while (!counts_.empty() && counts_.back() == 0) counts_.pop_back();
}

CountedResiduals::CountedResiduals(const CountedAmounts& counted, double min_unit) : min_unit_(min_unit) {
    entries_.reserve(counted.amounts.size());
    for (std::size_t i = 0; i < counted.amounts.size(); ++i) {
        size_ += counted.counts[i];
        add(entries_, {counted.amounts[i], counted.counts[i]});
    }
}

double CountedResiduals::at(std::uint64_t index) const {
    std::uint64_t below = size_;
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
        below -= entry->second;
        if (index >= below) return entry->first;
    }
    return min_unit_;
}

void CountedResiduals::subtract(double step) {
    const auto split = std::lower_bound(entries_.begin(), entries_.end(), step,
                                        [](const Entry& entry, double value) { return entry.first < value; });
    moved_.clear();
    for (auto entry = split; entry != entries_.end(); ++entry) add(moved_, {entry->first - step, entry->second});
    merged_.clear();
    merged_.reserve(static_cast<std::size_t>(split - entries_.begin()) + moved_.size());
    auto kept = entries_.begin();
    for (const Entry& entry : moved_) {
        while (kept != split && kept->first <= entry.first) add(merged_, *kept++);
        add(merged_, entry);
    }
    merged_.insert(merged_.end(), kept, split);
    entries_.swap(merged_);
}

void CountedResiduals::add(std::vector<Entry>& entries, const Entry& entry) {
    if (entry.first <= 0.0) {
        size_ -= entry.second;
    } else if (entry.first <= min_unit_) {
        dust_ += entry.second;
    } else if (!entries.empty() && entries.back().first == entry.first) {
        entries.back().second += entry.second;
    } else {
        entries.push_back(entry);
    }
}

BucketedResiduals::BucketedResiduals(std::size_t capacity, double min_unit, double largest)
    : min_unit_(min_unit), first_bits_(to_bits(min_unit)) {
    const std::uint64_t range = largest > min_unit ? to_bits(largest) - first_bits_ : 0;
    while ((range >> shift_) >= kBuckets) ++shift_;
    buckets_.resize(static_cast<std::size_t>(range >> shift_) + 1);
    // Every bucket may have one block that is not full, and one block is being emptied while its values move on.
    const std::size_t blocks = capacity / kBlock + buckets_.size() + 2;
    values_.reset(new double[blocks * kBlock]);
    previous_.reset(new std::uint32_t[blocks]);
}

void BucketedResiduals::extend(Bucket& bucket) {
    std::uint32_t block = used_blocks_;
    if (free_blocks_.empty()) {
        ++used_blocks_;
    } else {
        block = free_blocks_.back();
        free_blocks_.pop_back();
    }
    previous_[block] = bucket.size == 0 ? 0 : static_cast<std::uint32_t>((bucket.end - 1) / kBlock);
    bucket.end = std::size_t{block} * kBlock;
}

void BucketedResiduals::subtract(double step) {
    // Ascending, so that a residual which is still at least step afterwards is not met a second time.
    for (std::size_t i = bucket_of(step); i < buckets_.size(); ++i) {
        const Bucket bucket = buckets_[i];
        buckets_[i] = Bucket{};
        walk(
            bucket, [&](double value) { add(value >= step ? value - step : value); },
            [&](std::size_t block) { free_blocks_.push_back(static_cast<std::uint32_t>(block)); });
    }
}

std::uint64_t BucketedResiduals::size() const {
    std::uint64_t size = dust_;
    for (const Bucket& bucket : buckets_) size += bucket.size;
    return size;
}

std::uint64_t ShardedResiduals::size() const {
    std::uint64_t size = 0;
    for (const BucketedResiduals& shard : shards_) size += shard.size();
    return size;
}

double ShardedResiduals::at(std::uint64_t index) const {
    std::uint64_t below = size();
    for (std::size_t bucket = shards_.front().buckets(); bucket-- > 0;) {
        for (const BucketedResiduals& shard : shards_) below -= shard.bucket_size(bucket);
        if (index >= below) return select(bucket, index - below);
    }
    return min_unit_;
}

// The residual of that rank within a bucket: large buckets are narrowed by counting the next bits first.
double ShardedResiduals::select(std::size_t bucket, std::uint64_t index) const {
    constexpr int kDigit = 11;
    constexpr std::uint64_t kSmall = 1 << 14;
    std::uint64_t size = 0;
    for (const BucketedResiduals& shard : shards_) size += shard.bucket_size(bucket);
    std::uint64_t floor = shards_.front().bucket_floor(bucket);
    int bits = shards_.front().bucket_bits();
    const auto inside = [&](double value) { return ((to_bits(value) - floor) >> bits) == 0; };
    while (size > kSmall && bits > 0) {
        const int digit = std::min(kDigit, bits);
        std::array<std::uint64_t, 1 << kDigit> counts{};
        for (const BucketedResiduals& shard : shards_) {
            shard.for_each(bucket, [&](double value) {
                if (inside(value)) ++counts[(to_bits(value) - floor) >> (bits - digit)];
            });
        }
        std::size_t cell = 0;
        while (index >= counts[cell]) index -= counts[cell++];
        size = counts[cell];
        bits -= digit;
        floor += std::uint64_t{cell} << bits;
    }
    if (bits == 0) return from_bits(floor);
    std::vector<double> values;
    values.reserve(static_cast<std::size_t>(size));
    for (const BucketedResiduals& shard : shards_) {
        shard.for_each(bucket, [&](double value) {
            if (inside(value)) values.push_back(value);
        });
    }
    const auto nth = values.begin() + static_cast<std::ptrdiff_t>(index);
    std::nth_element(values.begin(), nth, values.end());
    return *nth;
}

void ShardedResiduals::subtract(double step) {
    parallel_for(shards_.size(), shards_.size(), [&](std::size_t begin, std::size_t end, std::size_t) {
        for (std::size_t shard = begin; shard < end; ++shard) shards_[shard].subtract(step);
    });
}

}  // namespace goal
