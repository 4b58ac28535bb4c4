// What a model is, as a dict: shared by Engine and QwenEngine.

#include "pocket/models/model_info.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace pocket::python {

py::dict model_info(const ModelInfo& info) {
  py::dict d;
  d["architecture"] = info.architecture;
  d["layers"] = info.layers;
  d["hidden"] = info.hidden;
  d["heads"] = info.heads;
  d["kv_heads"] = info.kv_heads;
  d["head_dim"] = info.head_dim;
  d["ffn"] = info.ffn;
  d["vocab"] = info.vocab;
  d["context"] = info.context;
  d["attention_layers"] = info.attention_layers;
  d["experts"] = info.experts;
  d["experts_used"] = info.experts_used;
  d["state_bytes"] = info.state_bytes;
  d["tokenizer_tokens"] = info.tokenizer_tokens;
  d["eos_token_ids"] = info.eos_token_ids;
  d["parameter_count"] = info.parameter_count;
  d["weight_bytes"] = info.weight_bytes;
  d["kv_bytes_per_block"] = info.kv_bytes_per_block;
  return d;
}

}  // namespace pocket::python
