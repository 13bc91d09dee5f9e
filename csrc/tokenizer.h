// Greedy decomposition of amounts into vocabulary tokens, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "grid.h"

namespace goal {

// Finds the largest token that is at most a residual. The leading bits of a residual lead to the first candidate, which
// nearly always is the answer.
class TokenIndex {
public:
    explicit TokenIndex(const std::vector<double>& steps);  // positive, descending

    // Index of the token for a finite residual of at least the smallest step.
    std::size_t operator()(double residual) const;

private:
    static constexpr std::size_t kCells = 1024;

    std::vector<double> steps_;  // with a 0 at the end
    std::uint64_t first_bits_ = 0;
    int shift_ = 0;
    std::size_t depth_ = 0;  // most steps that share a cell
    std::vector<std::uint32_t> candidates_;
};

class Tokenizer {
public:
    // vocabulary: finite, positive, strictly descending. Throws std::invalid_argument naming the entry that is not.
    explicit Tokenizer(std::vector<double> vocabulary);

    // Writes max_length tokens for each amount, -1 after the last, and its length. Returns how many amounts were cut at
    // max_length; without `truncate` such an amount throws std::invalid_argument, as a bad one does. Amount is double,
    // float or std::int64_t.
    template <typename Amount>
    std::size_t encode(const Amount* amounts, std::size_t size, std::size_t max_length, bool truncate, int threads,
                       std::int32_t* tokens, std::int32_t* lengths) const;

    // Adds up each row of `width` tokens; -1 adds nothing. Token is std::int32_t or std::int64_t.
    template <typename Token>
    void decode(const Token* tokens, std::size_t size, std::size_t width, int threads, double* amounts) const;

private:
    struct Table;

    Table make_table(std::size_t size, std::size_t max_length) const;
    template <bool Streamed, typename Amount>
    std::size_t write_known(const Amount* amounts, std::size_t size, const Table& table, std::size_t max_length,
                            std::int32_t* tokens, std::int32_t* lengths) const;
    void decompose(double* residuals, std::size_t size, std::size_t max_length, const TokenIndex& index,
                   std::int32_t* rows, std::int32_t* lengths) const;

    std::optional<Grid> grid_;
    std::vector<double> steps_;  // what the tokens stand for: units of the grid where there is one, amounts elsewhere
};

}  // namespace goal
