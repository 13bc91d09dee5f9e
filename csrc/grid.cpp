#include "grid.h"

namespace goal {

namespace {

bool is_whole(double x) { return x == std::floor(x) && x <= kMaxExact; }

}  // namespace

Grid::Grid(double unit, int decimals) {
    numerator_ = unit;
    double scale = 1.0;
    for (int places = 0; places <= 6; ++places, scale *= 10.0) {
        const double numerator = std::floor(unit * scale + 0.5);
        if (numerator >= 1.0 && numerator <= 1e9 && numerator / scale == unit) {
            numerator_ = numerator;
            denominator_ = scale;
            break;
        }
    }
    const double inverse = std::floor(1.0 / unit + 0.5);
    if (numerator_ == unit && !is_whole(unit) && inverse <= 1e9 && 1.0 / inverse == unit) {
        numerator_ = 1.0;
        denominator_ = inverse;
    }
    for (int place = 0; place < decimals; ++place) denominator_ *= 10.0;
    unit_ = numerator_ / denominator_;
    int exponent = 0;
    exact_ = std::frexp(denominator_, &exponent) == 0.5;
    if (!exact_) {
        // unit_ itself is rounded, so is every multiple; a 0.5 or 0.25 written as 5/10 or 25/100 is not.
        exact_ = unit_ * denominator_ == numerator_ && std::fma(unit_, denominator_, -numerator_) == 0.0;
    }
    product_ = exact_;
    if (decimals > 0 || exact_) limit_ = 0x1p46;
    if (decimals > 0) narrow_limit_ = 0x1p20;
}

}  // namespace goal
