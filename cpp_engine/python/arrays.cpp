#include "arrays.h"

#include <string>

namespace py = pybind11;

namespace pocket::python {

template <typename T>
std::span<const T> view(const py::handle& object, const char* name, std::size_t dimensions) {
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(std::string(name) + ": must be a numpy array, got " +
                         std::string(py::str(py::type::of(object).attr("__name__"))));
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (!py::isinstance<py::array_t<T>>(object)) {
    throw py::type_error(std::string(name) + ": must have dtype " +
                         std::string(py::str(py::dtype::of<T>())) + ", got " +
                         std::string(py::str(array.dtype())));
  }
  if (static_cast<std::size_t>(array.ndim()) != dimensions) {
    throw py::value_error(std::string(name) + ": must have " + std::to_string(dimensions) +
                          " dimension(s), got " + std::to_string(array.ndim()));
  }
  if ((array.flags() & py::array::c_style) == 0) {
    throw py::value_error(std::string(name) + ": must be C-contiguous");
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

std::size_t columns(const py::handle& object) {
  return static_cast<std::size_t>(py::reinterpret_borrow<py::array>(object).shape(1));
}

template std::span<const std::int32_t> view(const py::handle&, const char*, std::size_t);
template std::span<const float> view(const py::handle&, const char*, std::size_t);
template std::span<const std::uint64_t> view(const py::handle&, const char*, std::size_t);

}  // namespace pocket::python
