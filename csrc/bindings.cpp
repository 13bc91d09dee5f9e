// The only file that knows Python: it takes checked NumPy arrays, releases the GIL and returns NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accumulator.h"
#include "pages.h"
#include "tokenizer.h"
#include "vocabulary.h"

namespace py = pybind11;

namespace {

template <typename Element>
using Array = py::array_t<Element, py::array::c_style>;

// Calls body with the array as Array<double>, Array<float> or Array<int64>: the Python side has checked the type.
template <typename Body>
auto with_amounts(const py::array& values, const Body& body) {
    if (py::isinstance<Array<double>>(values)) return body(values.cast<Array<double>>());
    if (py::isinstance<Array<float>>(values)) return body(values.cast<Array<float>>());
    if (py::isinstance<Array<std::int64_t>>(values)) return body(values.cast<Array<std::int64_t>>());
    throw std::invalid_argument("values must be a C-contiguous float64, float32 or int64 array");
}

template <typename Element>
py::array_t<Element> to_numpy(const std::vector<Element>& elements) {
    return py::array_t<Element>(static_cast<py::ssize_t>(elements.size()), elements.data());
}

// A rows x columns array, not initialised.
template <typename Element>
py::array_t<Element> new_array(py::ssize_t rows, py::ssize_t columns) {
    const std::size_t bytes = static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * sizeof(Element);
    if (bytes >= goal::Pages::kLeast) {
        auto pages = std::make_unique<goal::Pages>(goal::Pages::take(bytes));
        if (pages->data() != nullptr) {
            auto* data = static_cast<Element*>(pages->data());
            const py::capsule owner(pages.get(), [](void* dropped) {
                const std::unique_ptr<goal::Pages> last(static_cast<goal::Pages*>(dropped));
                goal::Pages::keep(std::move(*last));
            });
            pages.release();  // the capsule has them now
            return py::array_t<Element>({rows, columns}, data, owner);
        }
    }
    return py::array_t<Element>({rows, columns});
}

std::vector<double> to_vector(const Array<double>& values) { return {values.data(), values.data() + values.size()}; }

py::array_t<double> build_vocabulary(const py::array& values, double q_start, double q_end, double decay,
                                     double relative_error, double min_unit, std::size_t max_tokens, int threads) {
    const goal::VocabularyOptions options{q_start, q_end, decay, relative_error, min_unit, max_tokens};
    return to_numpy(with_amounts(values, [&](const auto& amounts) {
        const auto* data = amounts.data();
        const auto size = static_cast<std::size_t>(amounts.size());
        const py::gil_scoped_release release;
        return goal::build_vocabulary(data, size, options, threads);
    }));
}

py::tuple encode(const py::array& values, const Array<double>& vocabulary, std::size_t max_length, bool truncate,
                 int threads) {
    const goal::Tokenizer tokenizer(to_vector(vocabulary));
    const auto rows = values.size();
    py::array_t<std::int32_t> tokens = new_array<std::int32_t>(rows, static_cast<py::ssize_t>(max_length));
    py::array_t<std::int32_t> lengths(rows);
    std::int32_t* token_data = tokens.mutable_data();
    std::int32_t* length_data = lengths.mutable_data();
    const std::size_t cut = with_amounts(values, [&](const auto& amounts) {
        const auto* data = amounts.data();
        const auto size = static_cast<std::size_t>(amounts.size());
        const py::gil_scoped_release release;
        return tokenizer.encode(data, size, max_length, truncate, threads, token_data, length_data);
    });
    return py::make_tuple(std::move(tokens), std::move(lengths), cut);
}

template <typename Token>
py::array_t<double> decode(const Array<Token>& tokens, const goal::Tokenizer& tokenizer, int threads) {
    const auto rows = tokens.shape(0);
    const auto width = tokens.shape(1);
    py::array_t<double> amounts(rows);
    const Token* data = tokens.data();
    double* amount_data = amounts.mutable_data();
    {
        const py::gil_scoped_release release;
        tokenizer.decode(data, static_cast<std::size_t>(rows), static_cast<std::size_t>(width), threads, amount_data);
    }
    return amounts;
}

py::array_t<double> decode_any(const py::array& tokens, const Array<double>& vocabulary, int threads) {
    const goal::Tokenizer tokenizer(to_vector(vocabulary));
    if (py::isinstance<Array<std::int32_t>>(tokens)) return decode(tokens.cast<Array<std::int32_t>>(), tokenizer, threads);
    if (py::isinstance<Array<std::int64_t>>(tokens)) return decode(tokens.cast<Array<std::int64_t>>(), tokenizer, threads);
    throw std::invalid_argument("tokens must be a C-contiguous int32 or int64 array");
}

// The GIL is released while adding, so two threads could add to one accumulator at once: a lock keeps them apart.
class LockedAccumulator {
public:
    explicit LockedAccumulator(goal::Accumulator accumulator) : accumulator_(std::move(accumulator)) {}

    void add(const py::array& values) {
        with_amounts(values, [&](const auto& amounts) {
            const auto* data = amounts.data();
            const auto size = static_cast<std::size_t>(amounts.size());
            const py::gil_scoped_release release;
            const std::lock_guard<std::mutex> lock(mutex_);
            accumulator_.add(data, size);
        });
    }
    // Calls body with the accumulator while the lock is held.
    template <typename Body>
    auto read(const Body& body) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return body(accumulator_);
    }
    void merge(const LockedAccumulator& other) {
        const py::gil_scoped_release release;
        const goal::Accumulator copy = other.read([](const goal::Accumulator& accumulator) { return accumulator; });
        const std::lock_guard<std::mutex> lock(mutex_);
        accumulator_.merge(copy);
    }

private:
    mutable std::mutex mutex_;
    goal::Accumulator accumulator_;
};

template <typename Body>
auto read(const LockedAccumulator& accumulator, const Body& body) {
    const py::gil_scoped_release release;
    return accumulator.read(body);
}

py::bytes to_bytes(const LockedAccumulator& self) {
    return py::bytes(read(self, [](const goal::Accumulator& accumulator) { return accumulator.to_bytes(); }));
}

std::unique_ptr<LockedAccumulator> from_bytes(const py::bytes& data) {
    return std::make_unique<LockedAccumulator>(goal::Accumulator::from_bytes(data));
}

py::array_t<double> build_accumulated(const LockedAccumulator& self, double q_start, double q_end, double decay,
                                      double relative_error, double min_unit, std::size_t max_tokens) {
    const goal::VocabularyOptions options{q_start, q_end, decay, relative_error, min_unit, max_tokens};
    return to_numpy(read(self, [&](const goal::Accumulator& accumulator) { return accumulator.build(options); }));
}

py::tuple counted(const LockedAccumulator& self) {
    const goal::CountedAmounts counted =
        read(self, [](const goal::Accumulator& accumulator) { return accumulator.counted(); });
    return py::make_tuple(to_numpy(counted.amounts), to_numpy(counted.counts));
}

// A read-only property that calls a const member of Accumulator.
template <typename Member>
auto property(Member member) {
    return [member](const LockedAccumulator& self) {
        return read(self, [&](const goal::Accumulator& accumulator) { return (accumulator.*member)(); });
    };
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native vocabulary builder and tokenizer; goal_kernels.vocabulary is the public face.";
    using namespace py::literals;
    module.def("build_vocabulary", &build_vocabulary, "values"_a, "q_start"_a, "q_end"_a, "decay"_a,
               "relative_error"_a, "min_unit"_a, "max_tokens"_a, "threads"_a);
    module.def("encode", &encode, "values"_a, "vocabulary"_a, "max_length"_a, "truncate"_a, "threads"_a);
    module.def("decode", &decode_any, "tokens"_a, "vocabulary"_a, "threads"_a);
    py::class_<LockedAccumulator>(module, "Accumulator")
        .def(py::init([](std::size_t capacity) {
                 return std::make_unique<LockedAccumulator>(goal::Accumulator(capacity));
             }),
             "capacity"_a)
        .def("add", &LockedAccumulator::add, "values"_a)
        .def("merge", &LockedAccumulator::merge, "other"_a)
        .def("to_bytes", &to_bytes)
        .def_static("from_bytes", &from_bytes, "data"_a)
        .def("build", &build_accumulated, "q_start"_a, "q_end"_a, "decay"_a, "relative_error"_a, "min_unit"_a,
             "max_tokens"_a)
        .def("counted", &counted)
        .def_property_readonly("positives", property(&goal::Accumulator::positives))
        .def_property_readonly("zeros", property(&goal::Accumulator::zeros))
        .def_property_readonly("capacity", property(&goal::Accumulator::capacity))
        .def_property_readonly("distinct", property(&goal::Accumulator::distinct))
        .def_property_readonly("dropped_bits", property(&goal::Accumulator::dropped_bits));
}
