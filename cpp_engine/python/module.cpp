#include <pybind11/pybind11.h>

PYBIND11_MODULE(pocket_cpp_core, m) {
  m.doc() = "PocketLLM C++ engine";
}
