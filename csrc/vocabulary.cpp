#include "vocabulary.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "residuals.h"

namespace goal {

namespace {

// Index of the q-quantile among `size` ascending values: an observed one, as np.quantile(method="inverted_cdf") has it.
std::uint64_t quantile_index(std::uint64_t size, double q) {
    const double index = std::ceil(static_cast<double>(size) * q - 1.0);
    if (!(index > 0.0)) return 0;
    return std::min(static_cast<std::uint64_t>(index), size - 1);
}

// Whether every residual has fallen to relative_error of its amount. Residuals never grow, so an amount that has passed
// is never looked at again, and while one fails the others do not matter.
template <typename At>
class ErrorBound {
public:
    ErrorBound(std::size_t size, const At& at, double relative_error)
        : size_(size), at_(at), relative_error_(relative_error) {}

    bool reached(const std::vector<double>& steps) {
        for (; passed_ < size_; ++passed_) {
            const double amount = at_(passed_);
            double residual = amount;
            for (const double step : steps) {
                if (residual >= step) residual -= step;
            }
            if (residual > 0.0 && residual / amount > relative_error_) return false;
        }
        return true;
    }

private:
    std::size_t size_;
    const At& at_;
    double relative_error_;
    std::size_t passed_ = 0;
};

// The loop of Algorithm 1 over one of the classes in residuals.h. at(0) ... at(size - 1) are the amounts, any order.
template <typename Residuals, typename At>
std::vector<double> choose_tokens(Residuals residuals, std::size_t size, const At& at, double min_unit,
                                  const VocabularyOptions& options) {
    std::vector<double> steps;
    std::vector<double> tokens;
    ErrorBound<At> bound(size, at, options.relative_error);
    double q = options.q_start;
    while (tokens.size() + 1 < options.max_tokens && residuals.size() > 0) {
        const double step = residuals.at(quantile_index(residuals.size(), q));
        if (step <= min_unit) break;
        steps.push_back(step);
        if (std::find(tokens.begin(), tokens.end(), step) == tokens.end()) tokens.push_back(step);
        residuals.subtract(step);
        if (bound.reached(steps)) break;
        q = std::max(q * options.decay, options.q_end);
    }
    tokens.push_back(min_unit);
    std::sort(tokens.begin(), tokens.end(), std::greater<>());
    return tokens;
}

std::vector<double> to_amounts(std::vector<double> tokens, const Grid& grid, double min_unit) {
    for (double& token : tokens) token = grid.amount(token);
    tokens.back() = min_unit;
    // Beyond 2^53 neighbouring multiples may be the same double.
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    return tokens;
}

void check(const VocabularyOptions& options) {
    const auto refuse = [](const std::string& name, const std::string& value, const std::string& expected) {
        throw std::invalid_argument(name + " is " + value + ", expected " + expected);
    };
    const auto share = [](double x) { return x > 0.0 && x <= 1.0; };
    if (!share(options.q_start)) refuse("q_start", text(options.q_start), "a number in (0, 1]");
    if (!share(options.q_end) || options.q_end > options.q_start) {
        refuse("q_end", text(options.q_end), "a number in (0, q_start = " + text(options.q_start) + "]");
    }
    if (!share(options.decay)) refuse("decay", text(options.decay), "a number in (0, 1]");
    if (!(options.relative_error >= 0.0) || std::isinf(options.relative_error)) {
        refuse("relative_error", text(options.relative_error), "a finite number of at least 0");
    }
    if (!(options.min_unit > 0.0) || std::isinf(options.min_unit)) {
        refuse("min_unit", text(options.min_unit), "a finite number above 0");
    }
    if (options.max_tokens < 1) refuse("max_tokens", text(options.max_tokens), "at least 1, which min_unit takes");
}

[[noreturn]] void refuse_without_amounts(std::size_t size) {
    throw std::invalid_argument("values has " + text(size) +
                                " entries and none above 0: a vocabulary needs at least one positive amount");
}

struct DenseCounts {
    std::vector<std::uint64_t> counts;
    bool products = true;  // every amount is count * unit, and not every one is count * numerator / denominator
};

// Counts of each multiple of the grid's unit, or nothing where an amount is none, or is `limit` units or more.
template <bool Exact, typename Amount>
std::optional<DenseCounts> count_multiples(const Amount* amounts, std::size_t size, const Grid& grid, std::size_t limit,
                                           std::size_t workers) {
    struct Piece {
        std::vector<std::uint32_t> counts;
        bool failed = false;
        bool quotients = true;
        bool products = true;
    };
    const auto fits = [&](double count) { return count >= 0.0 && count < static_cast<double>(limit); };
    for (std::size_t i = 0; i < std::min<std::size_t>(size, 256); ++i) {
        if (!fits(grid.count(amounts[i]))) return std::nullopt;  // before any memory is taken
    }
    std::vector<Piece> pieces(workers);
    DenseCounts total;
    constexpr std::size_t kStretch = std::size_t{1} << 31;  // so that 32-bit counts cannot overflow
    for (std::size_t start = 0; start < size; start += kStretch) {
        parallel_for(std::min(kStretch, size - start), workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
            Piece& piece = pieces[worker];
            piece.counts.assign(limit, 0);
            std::uint32_t* counts = piece.counts.data();
            for (std::size_t i = start + begin; i < start + end; ++i) {
                const double count = grid.count(amounts[i]);
                if (!fits(count)) {
                    piece.failed = true;
                    return;
                }
                if constexpr (!Exact) {
                    piece.quotients = piece.quotients && grid.is_quotient(static_cast<double>(amounts[i]), count);
                    piece.products = piece.products && grid.is_product(static_cast<double>(amounts[i]), count);
                }
                ++counts[static_cast<std::uint32_t>(count)];
            }
        });
        for (const Piece& piece : pieces) {
            if (piece.failed) return std::nullopt;
        }
        total.counts.resize(limit, 0);
        for (const Piece& piece : pieces) {
            for (std::size_t k = 0; k < piece.counts.size(); ++k) total.counts[k] += piece.counts[k];
        }
    }
    bool quotients = true;
    for (const Piece& piece : pieces) {
        quotients = quotients && piece.quotients;
        total.products = total.products && piece.products;
    }
    total.products = total.products && !quotients;
    while (!total.counts.empty() && total.counts.back() == 0) total.counts.pop_back();
    return total;
}

// Largest amount, having checked all.
template <typename Amount>
double check_amounts(const Amount* amounts, std::size_t size, std::size_t workers) {
    std::vector<double> largest(workers, 0.0);
    parallel_for(size, workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
        Amount most = 0;
        for (std::size_t i = begin; i < end; ++i) {
            if (!is_valid(amounts[i])) throw InvalidAmount(i, amounts[i]);
            most = std::max(most, amounts[i]);
        }
        largest[worker] = static_cast<double>(most);
    });
    return *std::max_element(largest.begin(), largest.end());
}

// Distinct positive amounts with counts, or nothing where there are more than `limit`.
template <typename Amount>
std::optional<CountedAmounts> count_distinct(const Amount* amounts, std::size_t size, std::size_t limit,
                                             std::size_t workers) {
    std::vector<Counter> counters(workers, Counter(limit));
    parallel_for(size, workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
        Counter& counter = counters[worker];
        for (std::size_t i = begin; i < end && counter.dropped_bits() == 0; ++i) {
            if (amounts[i] > 0) counter.add(static_cast<double>(amounts[i]), 1);
        }
    });
    for (std::size_t worker = 1; worker < workers; ++worker) counters[0].merge(counters[worker]);
    if (counters[0].dropped_bits() > 0) return std::nullopt;
    return counters[0].sorted();
}

template <typename Amount>
std::vector<double> build_from_buckets(const Amount* amounts, std::size_t size, double largest,
                                       const VocabularyOptions& options, std::size_t workers) {
    const auto original = [&](std::size_t i) { return amounts[i]; };
    const std::optional<Grid> grid = find_grid(size, original, options.min_unit);
    const auto at = [&](std::size_t i) { return grid ? grid->count(amounts[i]) : static_cast<double>(amounts[i]); };
    const double min_unit = grid ? grid->count(options.min_unit) : options.min_unit;
    // The largest amount came through the same type, so it is a multiple wherever all amounts are.
    const double top = grid ? grid->count(static_cast<Amount>(largest)) : largest;
    std::vector<std::optional<BucketedResiduals>> filled(workers);
    parallel_for(size, workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
        BucketedResiduals& shard = filled[worker].emplace(end - begin, min_unit, top);
        for (std::size_t i = begin; i < end; ++i) shard.add(at(i));
    });
    std::vector<BucketedResiduals> shards;
    for (std::optional<BucketedResiduals>& shard : filled) shards.push_back(std::move(*shard));
    ShardedResiduals residuals(std::move(shards), min_unit);
    std::vector<double> tokens = choose_tokens(std::move(residuals), size, at, min_unit, options);
    return grid ? to_amounts(std::move(tokens), *grid, options.min_unit) : tokens;
}

}  // namespace

std::vector<double> build_vocabulary(const CountedAmounts& counted, bool narrow, const VocabularyOptions& options) {
    check(options);
    const std::size_t size = counted.amounts.size();
    if (size == 0) refuse_without_amounts(0);
    const auto wide = [&](std::size_t i) { return counted.amounts[i]; };
    const auto as_float = [&](std::size_t i) { return static_cast<float>(counted.amounts[i]); };
    const std::optional<Grid> grid =
        narrow ? find_grid(size, as_float, options.min_unit) : find_grid(size, wide, options.min_unit);
    if (!grid) return choose_tokens(CountedResiduals(counted, options.min_unit), size, wide, options.min_unit, options);
    CountedAmounts units = counted;
    for (std::size_t i = 0; i < size; ++i) units.amounts[i] = narrow ? grid->count(as_float(i)) : grid->count(wide(i));
    const double min_unit = grid->count(options.min_unit);
    const auto at = [&](std::size_t i) { return units.amounts[i]; };
    return to_amounts(choose_tokens(CountedResiduals(units, min_unit), size, at, min_unit, options), *grid,
                      options.min_unit);
}

template <typename Amount>
std::vector<double> build_vocabulary(const Amount* amounts, std::size_t size, const VocabularyOptions& options,
                                     int threads) {
    check(options);
    const std::size_t workers = worthwhile_workers(size, threads);
    // Counters take less than a fifth of the input's memory, or some ten kilobytes where that is more.
    const std::size_t limit = std::max<std::size_t>(4096, size * sizeof(Amount) / (6 * (4 * workers + 8)));
    Grid grid(options.min_unit, 0);
    std::optional<DenseCounts> dense = grid.exact() ? count_multiples<true>(amounts, size, grid, limit, workers)
                                                    : count_multiples<false>(amounts, size, grid, limit, workers);
    if (dense) {
        if (dense->counts.size() < 2) refuse_without_amounts(size);
        if (dense->products) grid.use_products();
        std::vector<bool> present(dense->counts.size());
        for (std::size_t k = 1; k < present.size(); ++k) present[k] = dense->counts[k] > 0;
        const auto at = [&](std::size_t k) { return present[k] ? static_cast<double>(k) : 0.0; };
        DenseResiduals residuals(std::move(dense->counts), 1);
        return to_amounts(choose_tokens(std::move(residuals), present.size(), at, 1.0, options), grid, options.min_unit);
    }
    const double largest = check_amounts(amounts, size, workers);
    if (!(largest > 0.0)) refuse_without_amounts(size);
    const std::size_t few = std::max<std::size_t>(4096, size / 512);
    if (const std::optional<CountedAmounts> counted = count_distinct(amounts, size, few, workers)) {
        return build_vocabulary(*counted, std::is_same_v<Amount, float>, options);
    }
    return build_from_buckets(amounts, size, largest, options, workers);
}

template std::vector<double> build_vocabulary(const double*, std::size_t, const VocabularyOptions&, int);
template std::vector<double> build_vocabulary(const float*, std::size_t, const VocabularyOptions&, int);
template std::vector<double> build_vocabulary(const std::int64_t*, std::size_t, const VocabularyOptions&, int);

}  // namespace goal
