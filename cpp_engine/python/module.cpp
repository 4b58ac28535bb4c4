// The extension module pocket_cpp_core: a thin skin over pocket/runtime/engine.h, one file per
// topic. Nothing here computes; every file of it may include the engine's public headers only.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/cpu/isa.h"
#include "pocket/models/model.h"

#ifndef POCKET_VERSION
#define POCKET_VERSION ""
#endif

namespace py = pybind11;

namespace pocket::python {
namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= detect_isa()) {
      names.emplace_back(isa_name(isa));
    }
  }
  return names;
}

py::dict build_info() {
  py::dict info;
  const std::string version = POCKET_VERSION;
  info["version"] = version.empty() ? "dev" : version;
  info["compiler"] = std::string("gcc-compatible ") + __VERSION__;
#ifdef NDEBUG
  info["assertions"] = false;
#else
  info["assertions"] = true;
#endif
  info["isa"] = std::string(isa_name(select_isa()));
  info["isas"] = available_isas();
  info["architectures"] = supported_architectures();
  return info;
}

}  // namespace
}  // namespace pocket::python

PYBIND11_MODULE(pocket_cpp_core, m) {
  m.doc() = "PocketLLM's C++ CPU engine: load a GGUF model, run packed mixed batches.";
  pocket::python::bind_errors(m);
  pocket::python::bind_logit_edits(m);
  pocket::python::bind_engine(m);
  pocket::python::bind_quantise(m);
  pocket::python::bind_older_names(m);
  pocket::python::bind_qwen_options(m);
  pocket::python::bind_inference_engine(m);
  pocket::python::bind_qwen_engine(m);
  pocket::python::bind_scheduler(m);
  m.def("build_info", &pocket::python::build_info,
        "Version, compiler, chosen and available instruction sets, supported architectures.");
}
