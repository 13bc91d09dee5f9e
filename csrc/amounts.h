// What counts as an amount, and amounts with their numbers of occurrences.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "grid.h"
#include "text.h"

namespace goal {

// An amount that no incentive can be: NaN, infinite, negative, or an integer that no double holds.
class InvalidAmount : public std::invalid_argument {
public:
    template <typename Amount>
    InvalidAmount(std::size_t index, Amount amount)
        : std::invalid_argument("values[" + text(index) + "] is " + text(amount) +
                                ", but an amount must be finite, not negative and, as an integer, at most 2^53 = "
                                "9007199254740992: drop or repair that entry") {}
};

template <typename Amount>
bool is_valid(Amount amount) {
    if constexpr (std::is_integral_v<Amount>) {
        return amount >= 0 && amount <= static_cast<Amount>(kMaxExact);
    } else {
        return amount >= 0 && amount <= std::numeric_limits<Amount>::max();
    }
}

struct CountedAmounts {
    std::vector<double> amounts;  // ascending, distinct, positive
    std::vector<std::uint64_t> counts;
};

}  // namespace goal
