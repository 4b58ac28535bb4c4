#pragma once

#include <pybind11/pybind11.h>

namespace pocket {
struct ModelInfo;
}

namespace pocket::python {

/// Its fields as a dict.
[[nodiscard]] pybind11::dict model_info(const ModelInfo& info);

/// Registers the exception classes and the translation of `pocket::Error`.
void bind_errors(pybind11::module_& m);
/// Registers `LogitEdits`.
void bind_logit_edits(pybind11::module_& m);
/// Registers `Engine`; after `LogitEdits`.
void bind_engine(pybind11::module_& m);
/// Registers quantize_rows.
void bind_quantise(pybind11::module_& m);
/// Registers TokenLogprob, QwenMtpStats, ForwardSmokeOptions and PersistentEngine.
void bind_older_names(pybind11::module_& m);
/// A QwenMtpStats: what `QwenEngine.mtp_stats` gives.
[[nodiscard]] pybind11::object no_mtp_stats();
/// Registers QwenEngineOptions with its enums, and names of the older interface.
void bind_qwen_options(pybind11::module_& m);
/// Registers InferenceEngine and what its calls take and give.
void bind_inference_engine(pybind11::module_& m);
/// Registers QwenEngine; after the two above.
void bind_qwen_engine(pybind11::module_& m);
/// Registers QwenBatchScheduler; after InferenceEngine.
void bind_scheduler(pybind11::module_& m);

}  // namespace pocket::python
