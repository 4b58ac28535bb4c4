#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace pocket::python {

/// Views of numpy arrays, never copies: a silent conversion would cost a step more than the call.
/// `name` is the argument's, for messages. Throws TypeError for another type or dtype and
/// ValueError for the wrong number of dimensions, a non-contiguous or a byte-swapped array.
template <typename T>
[[nodiscard]] std::span<const T> view(const pybind11::handle& object, const char* name,
                                      std::size_t dimensions = 1);

/// Columns of a two-dimensional array that `view` has accepted.
[[nodiscard]] std::size_t columns(const pybind11::handle& object);

}  // namespace pocket::python
