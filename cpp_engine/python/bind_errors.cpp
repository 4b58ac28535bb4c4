// Python exception classes, one per pocket::ErrorCode, and the only place that translates.

#include <pybind11/pybind11.h>

#include <array>
#include <exception>
#include <string>
#include <utility>

#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/runtime/qwen_engine.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

struct Translation {
  ErrorCode code;
  const char* class_name;
  const char* code_name;  // the class attribute `code`
  PyObject* also;         // a builtin that callers may catch instead; null: none
};

// The classes live as long as the module, which is never unloaded.
std::array<std::pair<ErrorCode, PyObject*>, 5> classes;

PyObject* unsupported_feature = nullptr;

void raise_unsupported(const UnsupportedFeature& error) {
  const py::object value = py::reinterpret_borrow<py::object>(unsupported_feature)(error.what());
  value.attr("feature") = error.feature();
  value.attr("field") = error.feature();
  PyErr_SetObject(unsupported_feature, value.ptr());
}

void translate(std::exception_ptr pending) {
  try {
    std::rethrow_exception(std::move(pending));
  } catch (const UnsupportedFeature& error) {
    raise_unsupported(error);
  } catch (const Error& error) {
    for (const auto& [code, type] : classes) {
      if (code == error.code()) {
        PyErr_SetString(type, error.what());
        return;
      }
    }
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// UnsupportedFeatureError is caught as the package's class of that name, too, where there is one:
// scripts import it from there.
void bind_unsupported_feature(py::module_& m) {
  py::list bases;
  bases.append(m.attr("Unsupported"));
  try {
    bases.append(py::module_::import("pocket_backend.api.errors").attr("UnsupportedFeatureError"));
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) {
      throw;
    }
  }
  const py::object type = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "pocket_cpp_core.UnsupportedFeatureError",
      "An option whose feature this engine does not have; `feature` names it.",
      py::tuple(bases).ptr(), nullptr));
  if (!type) {
    throw py::error_already_set();
  }
  m.attr("UnsupportedFeatureError") = type;
  unsupported_feature = py::object(type).release().ptr();  // lives as long as the module
}

}  // namespace

void bind_errors(py::module_& m) {
  const py::object base = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "pocket_cpp_core.EngineError", "Base of the engine's errors; `code` says which kind.",
      PyExc_RuntimeError, nullptr));
  if (!base) {
    throw py::error_already_set();
  }
  base.attr("code") = "internal";
  m.attr("EngineError") = base;

  const std::array translations{
      Translation{ErrorCode::kInvalidArgument, "InvalidArgument", "invalid_argument",
                  PyExc_ValueError},
      Translation{ErrorCode::kBadFile, "ModelFileError", "bad_file", nullptr},
      Translation{ErrorCode::kUnsupported, "Unsupported", "unsupported", nullptr},
      Translation{ErrorCode::kResourceExhausted, "ResourceExhausted", "resource_exhausted",
                  PyExc_MemoryError},
      Translation{ErrorCode::kInternal, "InternalError", "internal", nullptr},
  };
  for (std::size_t i = 0; i < translations.size(); ++i) {
    const Translation& entry = translations[i];
    py::list bases;
    bases.append(base);
    if (entry.also != nullptr) {
      bases.append(py::reinterpret_borrow<py::object>(entry.also));
    }
    const std::string name = std::string("pocket_cpp_core.") + entry.class_name;
    py::object type = py::reinterpret_steal<py::object>(
        PyErr_NewException(name.c_str(), py::tuple(bases).ptr(), nullptr));
    if (!type) {
      throw py::error_already_set();
    }
    type.attr("code") = entry.code_name;
    m.attr(entry.class_name) = type;
    classes[i] = {entry.code, type.release().ptr()};
  }
  bind_unsupported_feature(m);
  py::register_local_exception_translator(&translate);
}

}  // namespace pocket::python
