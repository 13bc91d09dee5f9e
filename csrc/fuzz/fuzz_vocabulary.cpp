// libFuzzer target: any bytes become options, amounts, a vocabulary, tokens and serialised state. Beside what the
// sanitizers see it checks that the ways to one result agree. csrc/fuzz/run.sh builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "../accumulator.h"
#include "../tokenizer.h"
#include "../vocabulary.h"

namespace {

#define REQUIRE(condition)                                                      \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (false)

class Bytes {
public:
    Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    template <typename Value>
    Value next() {
        Value value{};
        const std::size_t count = std::min(sizeof value, size_);
        if (count > 0) std::memcpy(&value, data_, count);
        data_ += count;
        size_ -= count;
        return value;
    }
    std::uint8_t byte() { return next<std::uint8_t>(); }
    std::size_t left() const { return size_; }
    std::string rest() const { return {reinterpret_cast<const char*>(data_), size_}; }

private:
    const std::uint8_t* data_;
    std::size_t size_;
};

double unit(Bytes& bytes) {
    static const double kUnits[] = {1.0, 0.01, 0.05, 0.25, 5.0, 1.0 / 3.0, 1e-6, 7.3};
    const std::uint8_t choice = bytes.byte();
    return choice < 240 ? kUnits[choice % 8] : bytes.next<double>();
}

template <typename Amount>
std::vector<Amount> amounts(Bytes& bytes) {
    std::vector<Amount> amounts;
    const std::uint8_t kind = bytes.byte();
    if (kind < 124) {
        while (bytes.left() > 0 && amounts.size() < 500) amounts.push_back(bytes.next<Amount>());
    } else if (kind < 250) {
        while (bytes.left() > 0 && amounts.size() < 500) amounts.push_back(static_cast<Amount>(bytes.next<std::uint16_t>()));
    } else {
        // More distinct amounts than are counted in a table, on a grid or off it.
        std::uint64_t state = bytes.next<std::uint64_t>() | 1;
        const double scale = kind % 2 == 0 ? 1.0 : 1.0 + 1.0 / (3.0 + bytes.byte());
        const int bits = 20 + bytes.byte() % 30;
        for (std::size_t i = 0; i < 5000; ++i) {
            state = state * 6364136223846793005ULL + 1442695040888963407ULL;
            amounts.push_back(static_cast<Amount>(std::floor(static_cast<double>(state >> (64 - bits))) * scale));
        }
    }
    return amounts;
}

template <typename Amount>
goal::CountedAmounts count(const std::vector<Amount>& amounts) {
    std::map<double, std::uint64_t> counts;
    for (const Amount amount : amounts) {
        if (amount > 0) ++counts[static_cast<double>(amount)];
    }
    goal::CountedAmounts counted;
    for (const auto& [amount, number] : counts) {
        counted.amounts.push_back(amount);
        counted.counts.push_back(number);
    }
    return counted;
}

template <typename Amount>
void round_trip(const std::vector<Amount>& amounts, const std::vector<double>& vocabulary, std::size_t max_length) {
    const goal::Tokenizer tokenizer(vocabulary);
    std::vector<std::int32_t> tokens(amounts.size() * max_length);
    std::vector<std::int32_t> lengths(amounts.size());
    const std::size_t cut =
        tokenizer.encode(amounts.data(), amounts.size(), max_length, true, 2, tokens.data(), lengths.data());
    REQUIRE(cut <= amounts.size());
    std::vector<double> decoded(amounts.size());
    tokenizer.decode(tokens.data(), amounts.size(), max_length, 2, decoded.data());
    for (std::size_t i = 0; i < amounts.size(); ++i) {
        const double amount = static_cast<double>(amounts[i]);
        const auto length = static_cast<std::size_t>(lengths[i]);
        REQUIRE(length <= max_length);
        for (std::size_t j = 0; j < max_length; ++j) {
            const std::int32_t token = tokens[i * max_length + j];
            REQUIRE((token == -1) == (j >= length));
            REQUIRE(token < static_cast<std::int32_t>(vocabulary.size()));
            REQUIRE(j == 0 || j >= length || token >= tokens[i * max_length + j - 1]);
        }
        // Float32 amounts stand for the multiple they are nearest to.
        const double rounding = amount * (sizeof(Amount) == 4 ? 0x1p-22 : 0x1p-40);
        REQUIRE(decoded[i] <= amount + rounding);
        if (length < max_length) REQUIRE(amount - decoded[i] <= vocabulary.back() + rounding);
    }
}

template <typename Amount>
void build(Bytes& bytes) {
    goal::VocabularyOptions options;
    options.q_start = (1 + bytes.byte()) / 256.0;
    options.q_end = options.q_start * (1 + bytes.byte()) / 256.0;
    options.decay = (1 + bytes.byte()) / 256.0;
    options.relative_error = bytes.byte() / 512.0;
    options.max_tokens = bytes.byte();
    options.min_unit = unit(bytes);
    const std::size_t max_length = 1 + bytes.byte() % 40;
    const std::vector<Amount> values = amounts<Amount>(bytes);
    const std::vector<double> vocabulary = goal::build_vocabulary(values.data(), values.size(), options, 2);
    REQUIRE(vocabulary.size() <= options.max_tokens);
    REQUIRE(vocabulary.back() == options.min_unit);
    for (std::size_t i = 1; i < vocabulary.size(); ++i) REQUIRE(vocabulary[i] < vocabulary[i - 1]);
    const goal::CountedAmounts counted = count(values);
    REQUIRE(vocabulary == goal::build_vocabulary(counted, sizeof(Amount) == 4, options));
    round_trip(values, vocabulary, max_length);

    const std::size_t middle = values.size() / 3;
    goal::Accumulator first(1 << 13);
    goal::Accumulator second(1 << 13);
    first.add(values.data(), middle);
    second.add(values.data() + middle, values.size() - middle);
    goal::Accumulator backwards = second;
    backwards.merge(first);
    first.merge(second);
    REQUIRE(first.to_bytes() == backwards.to_bytes());
    REQUIRE(goal::Accumulator::from_bytes(first.to_bytes()).to_bytes() == first.to_bytes());
    REQUIRE(first.build(options) == vocabulary);

    goal::Accumulator small(2048);
    small.add(values.data(), values.size());
    goal::Accumulator reversed(2048);
    for (std::size_t i = values.size(); i-- > 0;) reversed.add(values.data() + i, 1);
    REQUIRE(small.to_bytes() == reversed.to_bytes());
    small.build(options);
}

template <typename Token>
void decode(Bytes& bytes) {
    std::vector<double> vocabulary;
    const std::size_t size = bytes.byte() % 40;
    for (std::size_t i = 0; i < size; ++i) vocabulary.push_back(bytes.next<double>());
    if (bytes.byte() % 2 == 0) std::sort(vocabulary.rbegin(), vocabulary.rend());
    const goal::Tokenizer tokenizer(vocabulary);
    const std::size_t width = bytes.byte() % 20;
    std::vector<Token> tokens;
    while (bytes.left() > 0) tokens.push_back(static_cast<Token>(bytes.next<std::int8_t>()));
    const std::size_t rows = width == 0 ? 3 : tokens.size() / width;
    std::vector<double> amounts(rows);
    tokenizer.decode(tokens.data(), rows, width, 1, amounts.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes(data, size);
    try {
        switch (bytes.byte() % 7) {
            case 0: build<double>(bytes); break;
            case 1: build<float>(bytes); break;
            case 2: build<std::int64_t>(bytes); break;
            case 3: decode<std::int32_t>(bytes); break;
            case 4: decode<std::int64_t>(bytes); break;
            case 5: {
                std::vector<double> vocabulary;
                const std::size_t length = bytes.byte() % 40;
                for (std::size_t i = 0; i < length; ++i) vocabulary.push_back(std::abs(bytes.next<double>()));
                std::sort(vocabulary.rbegin(), vocabulary.rend());
                std::vector<double> values;
                while (bytes.left() > 0) values.push_back(bytes.next<double>());
                round_trip(values, vocabulary, 7);
                break;
            }
            default: {
                const goal::Accumulator loaded = goal::Accumulator::from_bytes("GOALVOC1" + bytes.rest());
                REQUIRE(goal::Accumulator::from_bytes(loaded.to_bytes()).to_bytes() == loaded.to_bytes());
            }
        }
    } catch (const std::invalid_argument&) {
        // Bad input is refused; anything else is a finding.
    }
    return 0;
}
