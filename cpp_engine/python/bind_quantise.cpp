// The encoders that `Engine(weights=...)` uses, for tools and tests that want the bytes.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "pocket/quant/quantize.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

py::array_t<std::uint8_t> quantize_rows(const py::object& values, const std::string& format) {
  const std::span<const float> all = view<float>(values, "values", 2);
  const std::size_t width = columns(values);
  const std::size_t rows = width == 0 ? 0 : all.size() / width;
  const DType type = parse_quantized_format("format", format);
  const std::size_t bytes = row_bytes(type, width);
  py::array_t<std::uint8_t> stored({rows, bytes});
  const std::span<std::byte> out(reinterpret_cast<std::byte*>(stored.mutable_data()), rows * bytes);
  const py::gil_scoped_release release;
  for (std::size_t row = 0; row < rows; ++row) {
    quantize_row(type, all.subspan(row * width, width), out.subspan(row * bytes, bytes));
  }
  return stored;
}

constexpr const char* kQuantizeDoc =
    R"(Rows of float32 as GGUF blocks: uint8 [rows, bytes of a row].

Args:
    values: float32 [rows, columns], columns a multiple of the format's block (32; K-quants 256).
    format: q8_0, q4_0, q4_1, q5_0, q5_1 (the bytes of gguf.quantize), q4_k, q5_k, q6_k (our own
        method: docs/formats.md). Another is refused by name.

Any thread; releases the GIL.)";

}  // namespace

void bind_quantise(py::module_& m) {
  m.def("quantize_rows", &quantize_rows, kQuantizeDoc, py::arg("values"), py::arg("format"));
}

}  // namespace pocket::python
