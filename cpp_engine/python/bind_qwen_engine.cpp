// class QwenEngine: slots with prefill, decode_step and reset.

#include <pybind11/eval.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "pocket/runtime/qwen_engine.h"
#include "py_qwen_options.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

// Both spellings are documented, engine.kv_cache_bytes and engine.kv_cache_bytes(): an int that
// gives itself when it is called serves both.
constexpr const char* kByteCount = R"(
class ByteCount(int):
    """A number of bytes; calling it gives it back, since both spellings are in use."""
    __slots__ = ()
    def __call__(self):
        return int(self)
)";

py::object make_byte_count(py::module_& m) {
  py::dict scope;
  scope["__name__"] = m.attr("__name__");
  py::exec(kByteCount, scope);
  return scope["ByteCount"];
}

void bind_stats(py::module_& m) {
  using S = QwenPrefixCacheStats;
  py::class_<S> type(m, "QwenPrefixCacheStats",
                     "The first six are of the last prompt; hits and misses count prompts, global "
                     "ones blocks.");
  type.def_readonly("reused_tokens", &S::reused_tokens)
      .def_readonly("computed_tokens", &S::computed_tokens)
      .def_readonly("prompt_tokens", &S::prompt_tokens)
      .def_readonly("resume_source", &S::resume_source)
      .def_readonly("matched_tokens", &S::matched_tokens)
      .def_readonly("hits", &S::hits)
      .def_readonly("misses", &S::misses)
      .def_property_readonly("global_hits", [](const S& s) { return s.blocks.hits; })
      .def_property_readonly("global_misses", [](const S& s) { return s.blocks.misses; })
      .def_property_readonly("global_cached_blocks", [](const S& s) { return s.blocks.cached; })
      .def_property_readonly("global_evictions", [](const S& s) { return s.blocks.evictions; })
      .def_property_readonly("global_cache_bytes",
                             [](const S& s) { return s.blocks.cached * s.bytes_per_block; })
      .def_property_readonly("global_cache_budget_bytes",
                             [](const S& s) { return s.blocks.total * s.bytes_per_block; });
  for (const char* const name : {"snapshots", "snapshot_bytes"}) {
    type.def_property_readonly(name, [](const S&) { return 0; });
  }
}

template <typename Type>
void refuse_workers(Type& type) {
  for (const char* const name :
       {"run_worker_loop", "worker_command_prefill", "worker_command_decode",
        "worker_command_reset", "worker_command_shutdown"}) {
    type.def(name, [name](const QwenEngine&, const py::args&, const py::kwargs&) {
      throw UnsupportedFeature(name, "the engine runs in one process, without workers");
    });
  }
}

py::dict telemetry(const QwenEngine& engine) {
  py::dict out;
  out["isa"] = std::string(isa_name(*engine.engine_options().isa));
  out["threads"] = engine.engine_options().threads;
  out["max_batch_size"] = engine.options().max_batch_size;
  out["kv_cache_bytes"] = engine.kv_cache_bytes();
  out["workspace_bytes"] = engine.workspace_bytes();
  out["weight_bytes"] = engine.model().weight_bytes;
  return out;
}

}  // namespace

void bind_qwen_engine(py::module_& m) {
  bind_stats(m);
  const py::object byte_count = make_byte_count(m);
  const auto bytes = [byte_count](auto read) {
    return [type = byte_count.ptr(), read](const QwenEngine& engine) {
      return py::reinterpret_borrow<py::object>(type)(read(engine));
    };
  };
  m.attr("ByteCount") = byte_count;  // keeps the type alive for the getters
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<QwenEngine, InferenceEngine> type(m, "QwenEngine", R"(Sequences in numbered slots.

QwenEngine(checkpoint_dir, options, layer_count=0, max_context=8192): a GGUF file or a Hugging Face
directory of any architecture that the engine runs, but none with recurrent state. layer_count:
0, or at least the model's layers; max_context is cut to what the model can do.

prefill(token_ids, slot_id) needs an empty slot, decode_step(token_id, slot_id) a prefilled one;
both give a QwenForwardResult. Methods from any thread, without the GIL while computing.

Raises InvalidArgument for misuse of a slot, ResourceExhausted when the KV pool is full,
UnsupportedFeatureError for an option whose feature is absent, and what Engine raises.)");
  type.def(py::init([](const std::filesystem::path& checkpoint, const PyQwenOptions* options,
                       std::size_t layer_count, std::size_t max_context) {
             const QwenEngineOptions native =
                 options == nullptr ? QwenEngineOptions{} : checked_options(*options);
             const py::gil_scoped_release release;
             return std::make_unique<QwenEngine>(checkpoint, native, layer_count, max_context);
           }),
           py::arg("checkpoint_dir"), py::arg("options") = py::none(), py::arg("layer_count") = 0,
           py::arg("max_context") = 8192);
  type.def(
          "prefill",
          [](QwenEngine& self, const std::vector<std::int32_t>& tokens, std::int32_t slot) {
            return self.prefill(tokens, slot);
          },
          py::arg("token_ids"), py::arg("slot_id") = 0, free_gil)
      .def("decode_step", &QwenEngine::decode_step, py::arg("token_id"), py::arg("slot_id") = 0,
           free_gil)
      .def(
          "generate",
          [](QwenEngine& self, const std::vector<std::int32_t>& tokens, std::size_t limit) {
            return self.generate(tokens, limit);
          },
          "The output's token ids, in a free slot, up to an end-of-text id.", py::arg("tokens"),
          py::arg("max_new_tokens"), free_gil)
      .def("reset", &QwenEngine::reset, "Empty a slot.", py::arg("slot_id") = 0, free_gil)
      .def("clear_prefix_cache", &QwenEngine::clear_prefix_cache, free_gil)
      .def("slot_position", &QwenEngine::position, "Tokens that a slot holds.", py::arg("slot_id"),
           free_gil)
      .def_property_readonly("position",
                             [](const QwenEngine& self) {
                               const py::gil_scoped_release release;
                               return self.position(0);
                             })
      .def_property_readonly("kv_cache_bytes",
                             bytes([](const QwenEngine& e) { return e.kv_cache_bytes(); }))
      .def_property_readonly("activation_workspace_peak_bytes",
                             bytes([](const QwenEngine& e) { return e.workspace_bytes(); }))
      .def_property_readonly("resident_weight_bytes",
                             bytes([](const QwenEngine& e) { return e.model().weight_bytes; }))
      .def_property_readonly("config",
                             [](const QwenEngine& self) { return model_info(self.model()); })
      .def_property_readonly("prefix_cache_stats",
                             [](const QwenEngine& self) {
                               const py::gil_scoped_release release;
                               return self.prefix_cache_stats();
                             })
      .def_property_readonly("mtp_stats", [](const QwenEngine&) { return no_mtp_stats(); })
      .def_property_readonly("runtime_telemetry", &telemetry);
  refuse_workers(type);
}

}  // namespace pocket::python
