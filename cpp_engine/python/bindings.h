#pragma once

#include <pybind11/pybind11.h>

namespace pocket::python {

/// Registers the exception classes and the translation of `pocket::Error`.
void bind_errors(pybind11::module_& m);
/// Registers `LogitEdits`.
void bind_logit_edits(pybind11::module_& m);
/// Registers `Engine`; after `LogitEdits`.
void bind_engine(pybind11::module_& m);

}  // namespace pocket::python
