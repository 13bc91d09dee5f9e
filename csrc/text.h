// Numbers as they are written in error messages.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace goal {

// The shortest decimal that reads back as the same double.
inline std::string text(double value) {
    char buffer[40];
    for (int digits = 1; digits <= 17; ++digits) {
        std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
        if (std::strtod(buffer, nullptr) == value) break;
    }
    return buffer;
}
inline std::string text(float value) {
    char buffer[40];
    for (int digits = 1; digits <= 9; ++digits) {
        std::snprintf(buffer, sizeof buffer, "%.*g", digits, static_cast<double>(value));
        if (std::strtof(buffer, nullptr) == value) break;
    }
    return buffer;
}
inline std::string text(std::int64_t value) { return std::to_string(value); }
inline std::string text(std::size_t value) { return std::to_string(value); }

}  // namespace goal
