// Algorithm 1 of the paper, "Incentive Vocabulary Construction".
#pragma once

#include <cstddef>
#include <vector>

#include "amounts.h"

namespace goal {

struct VocabularyOptions {
    double q_start = 0.9999;       // percentile of the first token
    double q_end = 0.9;            // the percentile never falls below this
    double decay = 0.99;           // delta of Algorithm 1
    double relative_error = 1e-3;  // epsilon_1: stop once every residual is at most this share of its amount
    double min_unit = 1.0;         // epsilon_2: the smallest token, always in the vocabulary
    std::size_t max_tokens = 512;
};

// Tokens from large to small. Amount is double, float or std::int64_t. Throws std::invalid_argument naming the option
// or the entry that is wrong. The number of threads does not change the result.
template <typename Amount>
std::vector<double> build_vocabulary(const Amount* amounts, std::size_t size, const VocabularyOptions& options,
                                     int threads);

// The same for amounts that have been counted. narrow: they were float32.
std::vector<double> build_vocabulary(const CountedAmounts& counted, bool narrow, const VocabularyOptions& options);

}  // namespace goal
