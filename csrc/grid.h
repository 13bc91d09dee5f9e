// Amounts that are whole multiples of a unit: the integers behind them, so that sums and differences are exact.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace goal {

constexpr double kMaxExact = 9007199254740992.0;  // 2^53: every whole number up to here is a double
constexpr int kMaxDecimals = 4;                   // a grid may be up to 10^4 times finer than the unit asked for

// Nearest whole number of a non-negative double, without the library call that baseline x86-64 needs for nearbyint.
inline double nearest_whole(double x) {
    constexpr double kShift = 4503599627370496.0;  // 2^52
    return x < kShift ? (x + kShift) - kShift : x;
}

class Grid {
public:
    // The grid of `unit` / 10^decimals. The unit is written as numerator/denominator where a short decimal or 1/m
    // gives it back, because 29 * 0.01 is not the double that a log's "0.29" reads as, and 29 / 100 is.
    Grid(double unit, int decimals);

    double unit() const { return unit_; }
    bool exact() const { return exact_; }

    // The amount that `count` units are.
    double amount(double count) const {
        return product_ ? count * unit_ : count * numerator_ / denominator_;
    }

    // The number of units in an amount, or -1 where it is no multiple. Float32 amounts are compared as float32: the
    // nearest one to a multiple is that multiple.
    double count(double amount) const {
        const double units = nearest_whole(amount / unit_);
        return matches(amount, units) ? units : -1.0;
    }
    double count(float amount) const {
        const double units = nearest_whole(static_cast<double>(amount) / unit_);
        return matches(amount, units) ? units : -1.0;
    }
    double count(std::int64_t amount) const { return count(static_cast<double>(amount)); }

    // As count(), but an amount between two multiples gives the lower one.
    template <typename Amount>
    double floor_count(Amount amount) const {
        const double value = static_cast<double>(amount);
        const double units = nearest_whole(value / unit_);
        if (matches(amount, units) || units <= 0.0) return units;
        return this->amount(units) > value ? units - 1.0 : units;
    }

    // Reports multiples as count * unit instead of count * numerator / denominator.
    void use_products() { product_ = true; }
    bool is_quotient(double amount, double count) const { return count * numerator_ / denominator_ == amount; }
    bool is_product(double amount, double count) const { return count * unit_ == amount; }

private:
    // Four rounding errors are forgiven: that is what adding up prices leaves, or making coins of them (20.49 * 100).
    bool matches(double amount, double units) const {
        if (exact_ && units * unit_ == amount) return true;
        return units <= limit_ && std::abs(units * numerator_ / denominator_ - amount) <= amount * 0x1p-50;
    }
    bool matches(float amount, double units) const {
        if (exact_) return static_cast<float>(units * unit_) == amount;
        return units <= narrow_limit_ && static_cast<float>(units * numerator_ / denominator_) == amount;
    }
    bool matches(std::int64_t amount, double units) const { return matches(static_cast<double>(amount), units); }

    double unit_ = 1.0;
    double numerator_ = 1.0;
    double denominator_ = 1.0;
    double limit_ = kMaxExact;         // beyond these counts every double, or every float, could seem to be a multiple
    double narrow_limit_ = kMaxExact;
    bool exact_ = true;
    bool product_ = true;
};

// The coarsest of unit, unit/10, ... unit/10^4 that the amounts at(0) ... at(size - 1) are multiples of.
template <typename At>
std::optional<Grid> find_grid(std::size_t size, const At& at, double unit) {
    for (int decimals = 0; decimals <= kMaxDecimals; ++decimals) {
        Grid grid(unit, decimals);
        if (!(grid.unit() > 0.0)) break;
        bool quotients = true;
        bool products = true;
        bool found = true;
        for (std::size_t i = 0; i < size && found; ++i) {
            const double count = grid.count(at(i));
            found = count >= 0.0 && count <= kMaxExact;
            quotients = quotients && grid.is_quotient(static_cast<double>(at(i)), count);
            products = products && grid.is_product(static_cast<double>(at(i)), count);
        }
        if (!found) continue;
        if (products && !quotients) grid.use_products();
        return grid;
    }
    return std::nullopt;
}

}  // namespace goal
