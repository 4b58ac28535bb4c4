// class Engine: load, step, logits, copy_blocks, and what an executor wants to know about them.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/quant/quantize.h"
#include "pocket/runtime/engine.h"
#include "py_logit_edits.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

constexpr std::pair<std::string_view, KvDType> kKvDTypes[] = {
    {"f32", KvDType::kF32}, {"f16", KvDType::kF16}, {"bf16", KvDType::kBF16}, {"i8", KvDType::kI8}};

KvDType parse_kv_dtype(const std::string& name) {
  for (const auto& [known, type] : kKvDTypes) {
    if (name == known) {
      return type;
    }
  }
  throw Error(ErrorCode::kUnsupported,
              "kv_dtype: got '" + name + "'; supported are f32, f16, bf16 and i8");
}

std::string kv_dtype_name(KvDType type) {
  for (const auto& [known, candidate] : kKvDTypes) {
    if (candidate == type) {
      return std::string(known);
    }
  }
  return "unknown";
}

Precision parse_precision(const std::string& name) {
  if (name == "int8") {
    return Precision::kInt8;
  }
  if (name == "f32") {
    return Precision::kExactF32;
  }
  throw Error(ErrorCode::kUnsupported, "precision: got '" + name + "'; supported are int8 and f32");
}

std::optional<DType> parse_weights(const std::optional<std::string>& name) {
  return name ? std::optional(parse_quantized_format("weights", *name)) : std::nullopt;
}

/// The Python object: an engine that calls from several threads cannot corrupt.
class PyEngine {
 public:
  PyEngine(const std::filesystem::path& model, const EngineOptions& options) {
    const py::gil_scoped_release release;
    engine_ = Engine::load(model, options);
  }

  py::tuple step(const py::object& token_ids, const py::object& positions,
                 const py::object& sequence_offsets, const py::object& block_tables,
                 const py::object& table_rows, const py::object& logits_rows,
                 const py::object& temperature, const py::object& top_k, const py::object& top_p,
                 const py::object& min_p, const py::object& seed, const py::object& token_index,
                 std::size_t sample_vocab, bool logprobs, const py::object& top_logprobs,
                 const py::object& edits, const py::object& allowed) {
    StepInput input =
        step_input(token_ids, positions, sequence_offsets, block_tables, table_rows, logits_rows);
    input.sample_vocab = sample_vocab;
    const std::size_t rows = input.logits_rows.size();
    const auto column = [rows](auto span, const char* name) {
      check_rows(span.size(), rows, name);
      return span;
    };
    const auto temperatures = column(view<float>(temperature, "temperature"), "temperature");
    const auto top_ks = column(view<std::int32_t>(top_k, "top_k"), "top_k");
    const auto top_ps = column(view<float>(top_p, "top_p"), "top_p");
    const auto min_ps = column(view<float>(min_p, "min_p"), "min_p");
    const auto seeds = column(view<std::uint64_t>(seed, "seed"), "seed");
    const auto indices = column(view<std::uint64_t>(token_index, "token_index"), "token_index");
    std::span<const std::int32_t> tops;
    if (!top_logprobs.is_none()) {
      tops = column(view<std::int32_t>(top_logprobs, "top_logprobs"), "top_logprobs");
    }
    std::vector<const LogitEdits*> row_edits;
    // Tuples of our own: nobody can drop an entry while the GIL is released.
    const py::tuple edit_objects = row_objects(edits, rows, "edits");
    const py::tuple mask_objects = row_objects(allowed, rows, "allowed");
    const std::vector<PyLogitEdits::Reading> reading = read_edits(edit_objects, row_edits);
    const std::vector<std::span<const std::int32_t>> masks = row_masks(mask_objects);

    py::array_t<std::int32_t> tokens(static_cast<py::ssize_t>(rows));
    py::array_t<float> token_logprobs(static_cast<py::ssize_t>(rows));
    std::int32_t* token = tokens.mutable_data();
    float* logprob = token_logprobs.mutable_data();
    std::vector<TokenLogprob> top(tops.size() * kMaxTopLogprobs,
                                  {.token = -1, .logprob = std::nanf("")});
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      sampling_.resize(rows);
      sampled_.resize(rows);
      for (std::size_t i = 0; i < rows; ++i) {
        const std::int32_t wanted = tops.empty() ? 0 : tops[i];
        sampling_[i] = {.temperature = temperatures[i],
                        .top_k = top_ks[i],
                        .top_p = top_ps[i],
                        .min_p = min_ps[i],
                        .seed = seeds[i],
                        .token_index = indices[i],
                        .logprob = tops.empty() ? logprobs : wanted >= 0,
                        .top_logprobs = std::max(wanted, 0),
                        .edits = row_edits.empty() ? nullptr : row_edits[i],
                        .allowed = masks.empty() ? std::span<const std::int32_t>{} : masks[i]};
      }
      input.sampling = sampling_;
      open_engine().step(input, {.sampled = sampled_, .logits = {}, .top = top});
      for (std::size_t i = 0; i < rows; ++i) {
        token[i] = sampled_[i].token;
        logprob[i] = sampled_[i].logprob;
      }
    }
    if (top_logprobs.is_none()) {
      return py::make_tuple(std::move(tokens), std::move(token_logprobs));
    }
    const py::ssize_t shape[] = {static_cast<py::ssize_t>(rows),
                                 static_cast<py::ssize_t>(kMaxTopLogprobs)};
    py::array_t<std::int32_t> top_tokens(shape);
    py::array_t<float> top_values(shape);
    for (std::size_t i = 0; i < top.size(); ++i) {
      top_tokens.mutable_data()[i] = top[i].token;
      top_values.mutable_data()[i] = top[i].logprob;
    }
    return py::make_tuple(std::move(tokens), std::move(token_logprobs), std::move(top_tokens),
                          std::move(top_values));
  }

  py::array_t<float> logits(const py::object& token_ids, const py::object& positions,
                            const py::object& sequence_offsets, const py::object& block_tables,
                            const py::object& table_rows, const py::object& logits_rows) {
    const StepInput input =
        step_input(token_ids, positions, sequence_offsets, block_tables, table_rows, logits_rows);
    const std::size_t rows = input.logits_rows.size();
    const std::size_t vocab = model_vocab();
    py::array_t<float> result({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(vocab)});
    const std::span<float> out{result.mutable_data(), rows * vocab};
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    open_engine().step(input, {.sampled = {}, .logits = out});
    return result;
  }

  void copy_blocks(const py::object& from, const py::object& to) {
    const auto sources = view<std::int32_t>(from, "from_blocks");
    const auto targets = view<std::int32_t>(to, "to_blocks");
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    open_engine().copy_blocks(sources, targets);
  }

  void save_states(const py::object& slots, const py::object& snapshots) {
    const auto sources = view<std::int32_t>(slots, "slots");
    const auto targets = view<std::int32_t>(snapshots, "snapshots");
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    open_engine().save_states(sources, targets);
  }

  void load_states(const py::object& snapshots, const py::object& slots) {
    const auto sources = view<std::int32_t>(snapshots, "snapshots");
    const auto targets = view<std::int32_t>(slots, "slots");
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    open_engine().load_states(sources, targets);
  }

  void close() {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    engine_.reset();
  }

  /// Reads something of the open engine; the lock may be held by a step, so the GIL is let go.
  template <typename Read>
  auto read(Read read) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return read(open_engine());
  }

 private:
  static StepInput step_input(const py::object& token_ids, const py::object& positions,
                              const py::object& sequence_offsets, const py::object& block_tables,
                              const py::object& table_rows, const py::object& logits_rows) {
    StepInput input;
    input.token_ids = view<std::int32_t>(token_ids, "token_ids");
    input.positions = view<std::int32_t>(positions, "positions");
    input.sequence_offsets = view<std::int32_t>(sequence_offsets, "sequence_offsets");
    input.block_tables = view<std::int32_t>(block_tables, "block_tables", 2);
    input.table_stride = columns(block_tables);
    input.table_rows = view<std::int32_t>(table_rows, "table_rows");
    input.logits_rows = view<std::int32_t>(logits_rows, "logits_rows");
    return input;
  }

  static void check_rows(std::size_t entries, std::size_t rows, const char* name) {
    if (entries != rows) {
      throw py::value_error(std::string(name) + ": has " + std::to_string(entries) +
                            " entries; logits_rows has " + std::to_string(rows));
    }
  }

  // Empty for None.
  static py::tuple row_objects(const py::object& list, std::size_t rows, const char* name) {
    if (list.is_none()) {
      return py::tuple();
    }
    if (!py::isinstance<py::list>(list)) {
      throw py::type_error(std::string(name) + ": must be a list or None");
    }
    py::tuple objects{py::reinterpret_borrow<py::list>(list)};
    check_rows(objects.size(), rows, name);
    return objects;
  }

  // Fills `out` with each row's edits or null.
  std::vector<PyLogitEdits::Reading> read_edits(const py::tuple& rows,
                                                std::vector<const LogitEdits*>& out) {
    std::vector<PyLogitEdits::Reading> reading;
    if (rows.empty()) {
      return reading;
    }
    const std::size_t vocab = model_vocab();
    reading.reserve(rows.size());
    out.assign(rows.size(), nullptr);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].is_none()) {
        continue;
      }
      if (!py::isinstance<PyLogitEdits>(rows[i])) {
        throw py::type_error("edits[" + std::to_string(i) + "]: must be LogitEdits or None");
      }
      auto& row = py::cast<PyLogitEdits&>(rows[i]);
      if (row.vocab() != vocab) {
        throw py::value_error("edits[" + std::to_string(i) + "]: made for " +
                              std::to_string(row.vocab()) + " ids; the model has " +
                              std::to_string(vocab));
      }
      out[i] = &row.read();
      reading.emplace_back(row);
    }
    return reading;
  }

  static std::vector<std::span<const std::int32_t>> row_masks(const py::tuple& rows) {
    std::vector<std::span<const std::int32_t>> masks(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].is_none()) {
        masks[i] = view<std::int32_t>(rows[i], "allowed");
        if (masks[i].empty()) {
          throw py::value_error("allowed[" + std::to_string(i) + "]: has no words; use None");
        }
      }
    }
    return masks;
  }

  Engine& open_engine() const {
    if (!engine_) {
      throw Error(ErrorCode::kInvalidArgument, "engine: it has been closed");
    }
    return *engine_;
  }

  std::size_t model_vocab() {
    return read([](const Engine& engine) { return engine.model().vocab; });
  }

  std::mutex mutex_;
  std::unique_ptr<Engine> engine_;
  std::vector<SamplingParams> sampling_;
  std::vector<SampledToken> sampled_;
};

std::unique_ptr<PyEngine> make_engine(const std::filesystem::path& model, std::size_t num_blocks,
                                      std::size_t max_sequences, std::size_t max_batch_tokens,
                                      std::size_t max_context, const std::string& kv_dtype,
                                      const std::string& precision, std::size_t threads,
                                      const std::optional<std::string>& isa,
                                      const std::optional<std::string>& weights,
                                      std::size_t state_snapshots) {
  EngineOptions options{.num_blocks = num_blocks,
                        .max_sequences = max_sequences,
                        .max_batch_tokens = max_batch_tokens,
                        .max_context = max_context,
                        .state_snapshots = state_snapshots,
                        .kv_dtype = parse_kv_dtype(kv_dtype),
                        .precision = parse_precision(precision),
                        .weights = parse_weights(weights),
                        .threads = threads,
                        .isa = std::nullopt};
  if (isa) {
    options.isa = parse_isa(*isa);
  }
  return std::make_unique<PyEngine>(model, options);
}

constexpr const char* kStepDoc = R"(Run one mixed batch and sample.

All arrays are C-contiguous numpy arrays, used without a copy: token_ids, positions [T] int32;
sequence_offsets [S + 1] int32; block_tables [tables, blocks per sequence] int32; table_rows [S]
int32; logits_rows [R] int32 (token indices to sample from); temperature, top_p, min_p [R] float32;
top_k [R] int32; seed, token_index [R] uint64. Ids >= sample_vocab (0: none) are never sampled.

Optional, per row: top_logprobs [R] int32 (-1: no log probability, 0: the chosen token's, 1..20: so
many alternatives, too); edits, a list of LogitEdits or None; allowed, a list of None or int32 bit
masks, in which token t is bit t % 32 of word t / 32. Arrays of masks are borrowed for the call.

Returns (tokens int32 [R], logprobs float32 [R]); a token of -1 marks a row without usable logits, -2
one whose edits and mask leave no token. logprobs are NaN unless asked for. With top_logprobs also
(ids int32 [R, 20], log probabilities float32 [R, 20]), best first; -1 and NaN where there is none.

Raises TypeError or ValueError naming the argument; InvalidArgument (a ValueError) when the step is
malformed, before anything has been computed. The GIL is released while computing; calls from
several threads wait for each other.)";

constexpr const char* kLogitsDoc =
    R"(Run one mixed batch; return logits float32 [R, vocab] of logits_rows.

Arguments as for step.)";

constexpr const char* kEngineDoc = R"(A loaded model with its KV pool.

Raises ModelFileError, Unsupported, InvalidArgument or ResourceExhausted, all EngineError.)";

}  // namespace

void bind_engine(py::module_& m) {
  m.def(
      "inspect_model",
      [](const std::filesystem::path& model, const std::string& kv_dtype) {
        const KvDType dtype = parse_kv_dtype(kv_dtype);
        const ModelInfo info = [&] {
          const py::gil_scoped_release release;
          return inspect_model(model, dtype);
        }();
        return model_info(info);
      },
      "Engine.model_info of a file without loading its weights (weight_bytes is 0).",
      py::arg("model"), py::kw_only(), py::arg("kv_dtype") = "f16");
  py::class_<PyEngine>(m, "Engine", kEngineDoc)
      .def(py::init(&make_engine), py::arg("model"), py::kw_only(), py::arg("num_blocks"),
           py::arg("max_sequences") = 16, py::arg("max_batch_tokens") = 512,
           py::arg("max_context") = 0, py::arg("kv_dtype") = "f16", py::arg("precision") = "int8",
           py::arg("threads") = 0, py::arg("isa") = py::none(), py::arg("weights") = py::none(),
           py::arg("state_snapshots") = 0)
      .def("step", &PyEngine::step, kStepDoc, py::kw_only(), py::arg("token_ids"),
           py::arg("positions"), py::arg("sequence_offsets"), py::arg("block_tables"),
           py::arg("table_rows"), py::arg("logits_rows"), py::arg("temperature"), py::arg("top_k"),
           py::arg("top_p"), py::arg("min_p"), py::arg("seed"), py::arg("token_index"),
           py::arg("sample_vocab") = 0, py::arg("logprobs") = false,
           py::arg("top_logprobs") = py::none(), py::arg("edits") = py::none(),
           py::arg("allowed") = py::none())
      .def("logits", &PyEngine::logits, kLogitsDoc, py::kw_only(), py::arg("token_ids"),
           py::arg("positions"), py::arg("sequence_offsets"), py::arg("block_tables"),
           py::arg("table_rows"), py::arg("logits_rows"))
      .def("copy_blocks", &PyEngine::copy_blocks,
           "Copy whole KV blocks, pair by pair in order; int32 arrays of equal length.",
           py::arg("from_blocks"), py::arg("to_blocks"))
      .def("save_states", &PyEngine::save_states,
           "Copy the recurrent states of slots into snapshots, pair by pair; int32 arrays of equal "
           "length.",
           py::arg("slots"), py::arg("snapshots"))
      .def("load_states", &PyEngine::load_states,
           "Copy snapshots of recurrent states into slots, pair by pair; int32 arrays of equal "
           "length.",
           py::arg("snapshots"), py::arg("slots"))
      .def("close", &PyEngine::close, "Free weights and KV memory; later calls raise.")
      .def_property_readonly(
          "model_info",
          [](PyEngine& self) {
            return model_info(self.read([](const Engine& e) { return e.model(); }));
          })
      .def_property_readonly("kv_cache_bytes",
                             [](PyEngine& self) {
                               return self.read([](const Engine& e) { return e.kv_cache_bytes(); });
                             })
      .def_property_readonly(
          "state_store_bytes",
          [](PyEngine& self) {
            return self.read([](const Engine& e) { return e.state_store_bytes(); });
          })
      .def_property_readonly(
          "workspace_bytes",
          [](PyEngine& self) {
            return self.read([](const Engine& e) { return e.workspace_bytes(); });
          })
      .def_property_readonly(
          "kv_dtype",
          [](PyEngine& self) {
            return self.read([](const Engine& e) { return kv_dtype_name(e.options().kv_dtype); });
          })
      .def_property_readonly("isa",
                             [](PyEngine& self) {
                               return self.read([](const Engine& e) {
                                 return std::string(isa_name(*e.options().isa));
                               });
                             })
      .def_property_readonly(
          "threads",
          [](PyEngine& self) {
            return self.read([](const Engine& e) { return e.options().threads; });
          })
      .def_property_readonly("max_context", [](PyEngine& self) {
        return self.read([](const Engine& e) { return e.options().max_context; });
      });
}

}  // namespace pocket::python
