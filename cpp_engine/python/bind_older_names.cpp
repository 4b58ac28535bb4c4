// Names of the older interface without a feature behind them here: records that scripts build or
// read, and an engine that is refused with what to use instead (docs/compat.md).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "pocket/runtime/qwen_engine.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

/// Log probabilities of one token; `present` says whether there are any.
struct PyTokenLogprob {
  bool present = false;
  float logprob = 0.0F;
  std::vector<std::int32_t> top_tokens;
  std::vector<float> top_logprobs;
};

/// What PersistentEngine was configured with.
struct ForwardSmokeOptions {
  int tp_world = 1;
  int tp_rank = 0;
  int device = 0;
  bool skip_fp4_host_prepare = false;
  std::string nccl_id_path;
};

/// What speculative decoding did: nothing, there being none.
struct QwenMtpStats {};

template <typename Value>
auto zero(const QwenMtpStats&) {
  return Value{};
}

}  // namespace

void bind_older_names(py::module_& m) {
  py::class_<PyTokenLogprob>(m, "TokenLogprob",
                             "Log probabilities of one token. No step of this module fills one "
                             "(Capabilities.logprobs is False); pocketllm.LLM has them.")
      .def(py::init<>())
      .def_readwrite("present", &PyTokenLogprob::present)
      .def_readwrite("logprob", &PyTokenLogprob::logprob)
      .def_readwrite("top_tokens", &PyTokenLogprob::top_tokens)
      .def_readwrite("top_logprobs", &PyTokenLogprob::top_logprobs);

  py::class_<QwenMtpStats> stats(m, "QwenMtpStats",
                                 "Counters of speculative decoding: zeros, there being none.");
  stats.def(py::init<>());
  for (const char* const name : {"verify_count", "proposed_drafts", "correct_drafts",
                                 "rollback_count", "replay_tokens", "confidence_count"}) {
    stats.def_property_readonly(name, &zero<int>);
  }
  for (const char* const name :
       {"confidence_sum", "confidence_min", "confidence_max", "prefill_seconds", "draft_seconds",
        "verify_seconds", "replay_seconds", "accept_length", "accept_rate", "mean_confidence"}) {
    stats.def_property_readonly(name, &zero<double>);
  }

  py::class_<ForwardSmokeOptions>(m, "ForwardSmokeOptions",
                                  "Options of PersistentEngine, which is refused.")
      .def(py::init<>())
      .def_readwrite("tp_world", &ForwardSmokeOptions::tp_world)
      .def_readwrite("tp_rank", &ForwardSmokeOptions::tp_rank)
      .def_readwrite("device", &ForwardSmokeOptions::device)
      .def_readwrite("skip_fp4_host_prepare", &ForwardSmokeOptions::skip_fp4_host_prepare)
      .def_readwrite("nccl_id_path", &ForwardSmokeOptions::nccl_id_path);

  struct PersistentEngine {};
  py::class_<PersistentEngine>(m, "PersistentEngine",
                               "Refused: UnsupportedFeatureError names what to use instead.")
      .def(py::init([](const py::args&, const py::kwargs&) -> PersistentEngine {
        throw UnsupportedFeature(
            "PersistentEngine",
            "it ran one model family on GPUs; use QwenEngine(checkpoint_dir, options), which runs "
            "every architecture of registered_architectures() without recurrent state, or "
            "pocketllm.LLM, which runs them all");
      }));
}

py::object no_mtp_stats() {
  return py::cast(QwenMtpStats{});
}

}  // namespace pocket::python
