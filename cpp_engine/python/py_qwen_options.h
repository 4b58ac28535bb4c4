#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <string>

#include "pocket/runtime/qwen_engine.h"

namespace pocket::python {

/// Kernel choices that are not automatic, by name.
struct PyKernelOptions {
  std::map<std::string, pybind11::object> values;
};

/// The Python object QwenEngineOptions.
struct PyQwenOptions {
  QwenEngineOptions native;
  PyKernelOptions kernel;
};

/// The options for the engine; throws `UnsupportedFeature` for a kernel choice.
[[nodiscard]] QwenEngineOptions checked_options(const PyQwenOptions& options);

}  // namespace pocket::python
