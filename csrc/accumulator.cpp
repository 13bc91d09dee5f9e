#include "accumulator.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace goal {

namespace {

constexpr char kMagic[] = "GOALVOC1";
constexpr std::size_t kMagicSize = sizeof kMagic - 1;
constexpr std::size_t kMinCapacity = 2048;  // doubles have fewer exponents: dropping the mantissa always suffices
constexpr std::size_t kMaxCapacity = std::size_t{1} << 32;
constexpr int kMantissaBits = 52;

// Little-endian on every machine.
void write(std::string& bytes, std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) bytes.push_back(static_cast<char>(value >> (8 * byte)));
}

class Reader {
public:
    explicit Reader(const std::string& bytes) : bytes_(bytes) {}

    std::uint64_t next() {
        if (bytes_.size() - place_ < 8) fail();
        std::uint64_t value = 0;
        for (int byte = 0; byte < 8; ++byte) {
            value |= std::uint64_t{static_cast<unsigned char>(bytes_[place_++])} << (8 * byte);
        }
        return value;
    }
    void skip(std::size_t count) { place_ += count; }
    std::size_t left() const { return bytes_.size() - place_; }

    [[noreturn]] static void fail() {
        throw std::invalid_argument("data is not a complete serialised VocabularyAccumulator: pass what to_bytes() gave");
    }

private:
    const std::string& bytes_;
    std::size_t place_ = 0;
};

}  // namespace

Accumulator::Accumulator(std::size_t capacity) : counter_(capacity) {
    if (capacity < kMinCapacity || capacity > kMaxCapacity) {
        throw std::invalid_argument("capacity is " + text(capacity) + ", expected " + text(kMinCapacity) + " to " +
                                    text(kMaxCapacity));
    }
}

template <typename Amount>
void Accumulator::add(const Amount* amounts, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        if (!is_valid(amounts[i])) throw InvalidAmount(i, amounts[i]);
    }
    if (size > 0 && !std::is_same_v<Amount, float>) narrow_ = false;
    for (std::size_t i = 0; i < size; ++i) {
        if (amounts[i] > 0) {
            counter_.add(static_cast<double>(amounts[i]), 1);
            ++positives_;
        } else {
            ++zeros_;
        }
    }
}

void Accumulator::merge(const Accumulator& other) {
    if (other.capacity() != capacity()) {
        throw std::invalid_argument("other has capacity " + text(other.capacity()) + ", expected the same as here, " +
                                    text(capacity()));
    }
    if (&other == this) {
        merge(Accumulator(other));
        return;
    }
    counter_.merge(other.counter_);
    positives_ += other.positives_;
    zeros_ += other.zeros_;
    narrow_ = narrow_ && other.narrow_;
}

std::vector<double> Accumulator::build(const VocabularyOptions& options) const {
    return build_vocabulary(counter_.sorted(), narrow_, options);
}

std::string Accumulator::to_bytes() const {
    const CountedAmounts counted = counter_.sorted();
    std::string bytes(kMagic, kMagicSize);
    bytes.reserve(kMagicSize + 8 * (5 + 2 * counted.amounts.size()));
    write(bytes, capacity());
    write(bytes, static_cast<std::uint64_t>(dropped_bits()));
    write(bytes, narrow_ ? 1 : 0);
    write(bytes, zeros_);
    write(bytes, counted.amounts.size());
    for (const double amount : counted.amounts) write(bytes, to_bits(amount));
    for (const std::uint64_t count : counted.counts) write(bytes, count);
    return bytes;
}

Accumulator Accumulator::from_bytes(const std::string& bytes) {
    if (bytes.compare(0, kMagicSize, kMagic) != 0) Reader::fail();
    Reader reader(bytes);
    reader.skip(kMagicSize);
    const std::uint64_t capacity = reader.next();
    if (capacity < kMinCapacity || capacity > kMaxCapacity) Reader::fail();
    Accumulator accumulator(static_cast<std::size_t>(capacity));
    const std::uint64_t dropped_bits = reader.next();
    const std::uint64_t narrow = reader.next();
    accumulator.zeros_ = reader.next();
    const std::uint64_t size = reader.next();
    if (dropped_bits > kMantissaBits || narrow > 1 || size > capacity || reader.left() != 16 * size) Reader::fail();
    accumulator.narrow_ = narrow == 1;
    accumulator.counter_.coarsen_to(static_cast<int>(dropped_bits));
    CountedAmounts counted{std::vector<double>(size), std::vector<std::uint64_t>(size)};
    for (double& amount : counted.amounts) amount = from_bits(reader.next());
    for (std::uint64_t& count : counted.counts) count = reader.next();
    for (std::size_t i = 0; i < size; ++i) {
        const double amount = counted.amounts[i];
        const std::uint64_t count = counted.counts[i];
        const bool repeated = i > 0 && (to_bits(amount) >> dropped_bits) <= (to_bits(counted.amounts[i - 1]) >> dropped_bits);
        if (!is_valid(amount) || !(amount > 0.0) || count == 0 || repeated || accumulator.positives_ + count < count) {
            Reader::fail();
        }
        accumulator.counter_.add(amount, count);
        accumulator.positives_ += count;
    }
    return accumulator;
}

template void Accumulator::add(const double*, std::size_t);
template void Accumulator::add(const float*, std::size_t);
template void Accumulator::add(const std::int64_t*, std::size_t);

}  // namespace goal
