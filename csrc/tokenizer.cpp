#include "tokenizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "amounts.h"
#include "counter.h"
#include "parallel.h"
#include "text.h"

namespace goal {

namespace {

constexpr std::size_t kBlock = 128;                            // amounts that are decomposed together
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;     // results above this are written past the cache

// Copies a row; streamed past the cache where the result is larger than any cache and is not read again here.
template <bool Streamed>
inline void write_row(std::int32_t* to, const std::int32_t* from, std::size_t length) {
#if defined(__SSE2__)
    if constexpr (Streamed) {
        const auto copy = [&](std::size_t i) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        };
        std::size_t i = 0;
        for (; i + 16 <= length; i += 16) {
            copy(i);
            copy(i + 4);
            copy(i + 8);
            copy(i + 12);
        }
        for (; i < length; i += 4) copy(i);
        return;
    }
#endif
    std::memcpy(to, from, length * sizeof *to);
}

inline void finish_rows() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <typename Amount>
[[noreturn]] void refuse_length(std::size_t index, Amount amount, std::size_t max_length) {
    throw std::invalid_argument("values[" + text(index) + "] is " + text(amount) + " and needs more than max_length = " +
                                text(max_length) + " tokens: raise max_length, truncate, or use a vocabulary with "
                                "larger values");
}

template <typename Token>
[[noreturn]] void refuse_token(const Token* row, std::size_t width, std::size_t index, std::size_t tokens) {
    std::size_t column = 0;
    while (column + 1 < width && row[column] >= -1 && (row[column] < 0 || static_cast<std::size_t>(row[column]) < tokens)) {
        ++column;
    }
    throw std::invalid_argument("tokens[" + text(index) + ", " + text(column) + "] is " + std::to_string(row[column]) +
                                ", but the vocabulary has the tokens 0 to " + text(tokens - 1) + ", and -1 for none");
}

}  // namespace

TokenIndex::TokenIndex(const std::vector<double>& steps) : steps_(steps), first_bits_(to_bits(steps.back())) {
    const std::uint64_t range = to_bits(steps.front()) - first_bits_;
    while ((range >> shift_) >= kCells) ++shift_;
    candidates_.resize(static_cast<std::size_t>(range >> shift_) + 1);
    std::size_t token = 0;
    for (std::size_t cell = candidates_.size(); cell-- > 0;) {
        // The first step that lies in this cell or below it.
        while (((to_bits(steps[token]) - first_bits_) >> shift_) > cell) ++token;
        candidates_[cell] = static_cast<std::uint32_t>(token);
        if (cell + 1 < candidates_.size()) depth_ = std::max<std::size_t>(depth_, token - candidates_[cell + 1]);
    }
    depth_ = std::max(depth_, steps.size() - 1 - token + 1);
    steps_.push_back(0.0);
}

inline std::size_t TokenIndex::operator()(double residual) const {
    const auto cell = static_cast<std::size_t>((to_bits(residual) - first_bits_) >> shift_);
    std::size_t token = candidates_[std::min(cell, candidates_.size() - 1)];
    if (depth_ == 1) return token + static_cast<std::size_t>(steps_[token] > residual);
    if (depth_ > 2) {
        while (steps_[token] > residual) ++token;
        return token;
    }
    // No branch: which side of a step a residual lies on is as good as random.
    token += static_cast<std::size_t>(steps_[token] > residual);
    token += static_cast<std::size_t>(steps_[token] > residual);
    return token;
}

// Whole rows for the first numbers of units; greedy decomposition of a larger one ends with one of them.
struct Tokenizer::Table {
    std::size_t size = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int32_t> lengths;  // max_length + 1 where more are needed
};

Tokenizer::Tokenizer(std::vector<double> vocabulary) : steps_(std::move(vocabulary)) {
    if (steps_.empty()) throw std::invalid_argument("vocabulary is empty, expected at least one value");
    for (std::size_t i = 0; i < steps_.size(); ++i) {
        const std::string entry = "vocabulary[" + text(i) + "] is " + text(steps_[i]);
        if (!(steps_[i] > 0.0) || std::isinf(steps_[i])) {
            throw std::invalid_argument(entry + ", expected a finite value above 0");
        }
        if (i > 0 && !(steps_[i] < steps_[i - 1])) {
            throw std::invalid_argument(entry + " after " + text(steps_[i - 1]) +
                                        ", expected strictly descending values: sort them and drop repeats");
        }
    }
    grid_ = find_grid(steps_.size(), [&](std::size_t i) { return steps_[i]; }, steps_.back());
    if (grid_) {
        for (double& step : steps_) step = grid_->count(step);
    }
}

Tokenizer::Table Tokenizer::make_table(std::size_t size, std::size_t max_length) const {
    Table table;
    if (!grid_) return table;
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    // Making a row costs about as much as using one, so only a fraction of the amounts is spent on it.
    table.size = std::min({size / 8, kBytes / (max_length * sizeof(std::int32_t)), std::size_t{1} << 16});
    if (steps_.front() + 1.0 < static_cast<double>(table.size)) table.size = static_cast<std::size_t>(steps_.front()) + 1;
    table.rows.assign(table.size * max_length, -1);
    table.lengths.assign(table.size, 0);
    const auto limit = static_cast<std::int32_t>(max_length);
    std::size_t token = steps_.size();
    for (std::size_t k = static_cast<std::size_t>(steps_.back()); k < table.size; ++k) {
        while (token > 0 && steps_[token - 1] <= static_cast<double>(k)) --token;
        const std::size_t rest = k - static_cast<std::size_t>(steps_[token]);
        std::int32_t* row = table.rows.data() + k * max_length;
        row[0] = static_cast<std::int32_t>(token);
        std::copy_n(table.rows.data() + rest * max_length, max_length - 1, row + 1);
        table.lengths[k] = std::min(table.lengths[rest], limit) + 1;
    }
    return table;
}

// Rows and lengths of up to kBlock residuals, which are used up; a length of max_length + 1 says that more are needed.
// One token of all of them before the next token of any, so that the processor works on many at once.
void Tokenizer::decompose(double* residuals, std::size_t size, std::size_t max_length, const TokenIndex& index,
                          std::int32_t* rows, std::int32_t* lengths) const {
    const double smallest = steps_.back();
    const double* steps = steps_.data();
    std::uint32_t open[kBlock];
    std::size_t count = 0;
    std::fill_n(rows, size * max_length, -1);
    for (std::size_t i = 0; i < size; ++i) {
        lengths[i] = 0;
        open[count] = static_cast<std::uint32_t>(i);
        count += residuals[i] >= smallest ? 1 : 0;
    }
    for (std::size_t length = 0; count > 0; ++length) {
        if (length == max_length) {
            for (std::size_t j = 0; j < count; ++j) ++lengths[open[j]];
            return;
        }
        std::size_t still_open = 0;
        for (std::size_t j = 0; j < count; ++j) {
            const std::uint32_t i = open[j];
            const std::size_t token = index(residuals[i]);
            rows[i * max_length + length] = static_cast<std::int32_t>(token);
            lengths[i] = static_cast<std::int32_t>(length) + 1;
            residuals[i] -= steps[token];
            open[still_open] = i;
            still_open += residuals[i] >= smallest ? 1 : 0;
        }
        count = still_open;
    }
}

// The quick way for multiples of the unit that have whole rows in the table, as most amounts do. Stops at the first one
// that has not, and returns how many it wrote.
template <bool Streamed, typename Amount>
std::size_t Tokenizer::write_known(const Amount* amounts, std::size_t size, const Table& table, std::size_t max_length,
                                   std::int32_t* tokens, std::int32_t* lengths) const {
    const Grid grid = *grid_;  // and other copies: what is written could alias the members otherwise
    const double limit = static_cast<double>(table.size);
    const std::int32_t* rows = table.rows.data();
    const std::int32_t* row_lengths = table.lengths.data();
    const auto longest = static_cast<std::int32_t>(max_length);
    for (std::size_t i = 0; i < size; ++i) {
        const double count = grid.count(amounts[i]);
        if (!(count >= 0.0 && count < limit)) return i;
        const auto k = static_cast<std::size_t>(static_cast<std::int64_t>(count));
        const std::int32_t length = row_lengths[k];
        if (length > longest) return i;
        lengths[i] = length;
        write_row<Streamed>(tokens + i * max_length, rows + k * max_length, max_length);
    }
    return size;
}

template <typename Amount>
std::size_t Tokenizer::encode(const Amount* amounts, std::size_t size, std::size_t max_length, bool truncate, int threads,
                              std::int32_t* tokens, std::int32_t* lengths) const {
    const std::size_t workers = worthwhile_workers(size, threads);
    const TokenIndex index(steps_);
    const Table table = make_table(size, max_length);
    const bool streamed = max_length % 4 == 0 && reinterpret_cast<std::uintptr_t>(tokens) % 16 == 0 &&
                          size * max_length * sizeof *tokens > kStreamBytes;
    std::vector<std::size_t> cut(workers, 0);
    // Threads share out whole blocks, so that which of several errors is met first does not depend on their number.
    parallel_for((size + kBlock - 1) / kBlock, workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
        double residuals[kBlock];
        std::size_t places[kBlock];
        std::int32_t block_lengths[kBlock];
        std::vector<std::int32_t> rows;
        const auto finish = [&](std::size_t i, const std::int32_t* row, std::int32_t length) {
            if (static_cast<std::size_t>(length) > max_length) {
                if (!truncate) refuse_length(i, amounts[i], max_length);
                ++cut[worker];
                --length;
            }
            if (streamed) {
                write_row<true>(tokens + i * max_length, row, max_length);
            } else {
                write_row<false>(tokens + i * max_length, row, max_length);
            }
            lengths[i] = length;
        };
        for (std::size_t block = begin; block < end; ++block) {
            const std::size_t first = block * kBlock;
            const std::size_t last = std::min(first + kBlock, size);
            std::size_t known = 0;
            if (table.size > 0) {
                const auto write = streamed ? &Tokenizer::write_known<true, Amount> : &Tokenizer::write_known<false, Amount>;
                known = (this->*write)(amounts + first, last - first, table, max_length, tokens + first * max_length,
                                       lengths + first);
                if (first + known == last) continue;
            }
            std::size_t count = 0;
            for (std::size_t i = first + known; i < last; ++i) {
                if (!is_valid(amounts[i])) throw InvalidAmount(i, amounts[i]);
                const double residual = grid_ ? grid_->floor_count(amounts[i]) : static_cast<double>(amounts[i]);
                if (residual < static_cast<double>(table.size)) {
                    const auto k = static_cast<std::size_t>(static_cast<std::int64_t>(residual));
                    finish(i, table.rows.data() + k * max_length, table.lengths[k]);
                } else {
                    residuals[count] = residual;
                    places[count++] = i;
                }
            }
            if (count == 0) continue;
            rows.resize(kBlock * max_length);
            decompose(residuals, count, max_length, index, rows.data(), block_lengths);
            for (std::size_t j = 0; j < count; ++j) finish(places[j], rows.data() + j * max_length, block_lengths[j]);
        }
        finish_rows();
    });
    std::size_t total = 0;
    for (const std::size_t count : cut) total += count;
    return total;
}

template <typename Token>
void Tokenizer::decode(const Token* tokens, std::size_t size, std::size_t width, int threads, double* amounts) const {
    // Entry 0 is "no token", and the last one makes the sum of a row with a bad token NaN.
    std::vector<double> values(steps_.size() + 2, 0.0);
    std::copy(steps_.begin(), steps_.end(), values.begin() + 1);
    values.back() = std::numeric_limits<double>::quiet_NaN();
    using Unsigned = std::make_unsigned_t<Token>;
    const auto last = static_cast<Unsigned>(values.size() - 1);
    const auto value = [&](Token token) {
        return values[static_cast<std::size_t>(std::min<Unsigned>(static_cast<Unsigned>(token) + 1u, last))];
    };
    constexpr std::size_t kPack = 16 / sizeof(Token);  // tokens in 16 bytes, skipped together where none is set
    parallel_for(size, worthwhile_workers(size, threads), [&](std::size_t begin, std::size_t end, std::size_t) {
        for (std::size_t i = begin; i < end; ++i) {
            const Token* row = tokens + i * width;
            double sum = 0.0;
            std::size_t j = 0;
            for (; j + kPack <= width; j += kPack) {
                std::uint64_t packed[2];
                std::memcpy(packed, row + j, sizeof packed);
                if ((packed[0] & packed[1]) == ~std::uint64_t{0}) continue;
                for (std::size_t i = j; i < j + kPack; ++i) sum += value(row[i]);
            }
            for (; j < width; ++j) sum += value(row[j]);
            if (std::isnan(sum)) refuse_token(row, width, i, steps_.size());
            amounts[i] = grid_ ? grid_->amount(sum) : sum;
        }
    });
}

template std::size_t Tokenizer::encode(const double*, std::size_t, std::size_t, bool, int, std::int32_t*,
                                       std::int32_t*) const;
template std::size_t Tokenizer::encode(const float*, std::size_t, std::size_t, bool, int, std::int32_t*,
                                       std::int32_t*) const;
template std::size_t Tokenizer::encode(const std::int64_t*, std::size_t, std::size_t, bool, int, std::int32_t*,
                                       std::int32_t*) const;
template void Tokenizer::decode(const std::int32_t*, std::size_t, std::size_t, int, double*) const;
template void Tokenizer::decode(const std::int64_t*, std::size_t, std::size_t, int, double*) const;

}  // namespace goal
