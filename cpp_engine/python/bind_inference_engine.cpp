// InferenceEngine, which Python may subclass, and the plain values of its calls.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/runtime/inference_engine.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

/// Calls from C++ (the scheduler's thread) to a Python subclass. Requests go over as copies: Python
/// may keep what it is given for as long as it likes.
class PyInferenceEngine final : public InferenceEngine {
 public:
  Capabilities caps() const override { return required<Capabilities>("caps"); }
  std::size_t max_context() const override { return required<std::size_t>("max_context"); }
  std::string device() const override { return read("device", InferenceEngine::device()); }
  std::size_t vocab_size() const override { return read("vocab_size", std::size_t{0}); }
  std::vector<std::int32_t> eos_token_ids() const override {
    return read("eos_token_ids", std::vector<std::int32_t>{});
  }
  std::size_t max_prefill_tokens() const override {
    return read("max_prefill_tokens", InferenceEngine::max_prefill_tokens());
  }
  bool kv_paged() const override { return read("kv_paged", false); }
  std::size_t kv_total_blocks() const override { return read("kv_total_blocks", std::size_t{0}); }
  std::size_t kv_free_blocks() const override { return read("kv_free_blocks", std::size_t{0}); }
  std::size_t kv_cache_pinned_blocks() const override {
    return read("kv_cache_pinned_blocks", std::size_t{0});
  }
  std::optional<std::int32_t> allocate_slot() override {
    const py::gil_scoped_acquire gil;
    return method("allocate_slot")().cast<std::optional<std::int32_t>>();
  }
  void free_slot(std::int32_t slot) override {
    const py::gil_scoped_acquire gil;
    method("free_slot")(slot);
  }
  BatchPrefillResult batch_prefill(std::span<BatchedRequest* const> requests,
                                   std::size_t token_budget) override {
    const py::gil_scoped_acquire gil;
    return method("batch_prefill")(copies(requests), token_budget).cast<BatchPrefillResult>();
  }
  BatchDecodeResult batch_decode_step(std::span<BatchedRequest* const> requests) override {
    const py::gil_scoped_acquire gil;
    return method("batch_decode_step")(copies(requests)).cast<BatchDecodeResult>();
  }

 private:
  static py::list copies(std::span<BatchedRequest* const> requests) {
    py::list out;
    for (const BatchedRequest* const request : requests) {
      out.append(py::cast(*request, py::return_value_policy::copy));
    }
    return out;
  }

  py::function method(const char* name) const {
    py::function found = py::get_override(static_cast<const InferenceEngine*>(this), name);
    if (!found) {
      missing(name);
    }
    return found;
  }

  [[noreturn]] static void missing(const char* name) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("InferenceEngine: the subclass does not define ") + name);
  }

  /// A property, method or plain attribute of the subclass; null if it has none of its own.
  py::object member(const char* name) const {
    const py::object self =
        py::cast(static_cast<const InferenceEngine*>(this), py::return_value_policy::reference);
    const py::object base = py::type::of<InferenceEngine>().attr(name);
    const bool own = !py::getattr(py::type::of(self), name, base).is(base) ||
                     (py::hasattr(self, "__dict__") && self.attr("__dict__").contains(name));
    if (!own) {
      return {};
    }
    py::object value = self.attr(name);
    return PyCallable_Check(value.ptr()) != 0 ? value() : value;
  }

  template <typename T>
  T read(const char* name, const T& otherwise) const {
    const py::gil_scoped_acquire gil;
    const py::object value = member(name);
    return value ? value.cast<T>() : otherwise;
  }

  template <typename T>
  T required(const char* name) const {
    const py::gil_scoped_acquire gil;
    const py::object value = member(name);
    if (!value) {
      missing(name);
    }
    return value.cast<T>();
  }
};

// Keyword arguments become attributes, so a misspelt one is an AttributeError.
template <typename T>
void keywords(py::class_<T>& type) {
  type.def(py::init([](const py::kwargs& values) {
    T made{};
    const py::object self = py::cast(&made, py::return_value_policy::reference);
    for (const auto& [name, value] : values) {
      py::setattr(self, name, value);
    }
    return made;
  }));
}

void bind_capabilities(py::module_& m) {
  py::class_<Capabilities> type(m, "Capabilities",
                                "What an engine can do. Calling the value gives it back: both "
                                "engine.caps and engine.caps() are written.");
  keywords(type);
  type.def("__call__", [](const Capabilities& self) { return self; })
      .def_readwrite("paged_kv", &Capabilities::paged_kv)
      .def_readwrite("continuous_batching", &Capabilities::continuous_batching)
      .def_readwrite("chunked_prefill", &Capabilities::chunked_prefill)
      .def_readwrite("max_slots", &Capabilities::max_slots)
      .def_readwrite("per_request_sampling", &Capabilities::per_request_sampling)
      .def_readwrite("per_request_top_k", &Capabilities::per_request_top_k)
      .def_readwrite("fixed_temperature", &Capabilities::fixed_temperature)
      .def_readwrite("fixed_top_p", &Capabilities::fixed_top_p)
      .def_readwrite("fixed_top_k", &Capabilities::fixed_top_k)
      .def_readwrite("fixed_seed", &Capabilities::fixed_seed)
      .def_readwrite("structured_outputs", &Capabilities::structured_outputs)
      .def_readwrite("logprobs", &Capabilities::logprobs);
}

template <typename Value>
auto constant(Value value) {
  return [value](const py::object&) { return value; };
}

void bind_forward_result(py::module_& m) {
  py::class_<ForwardResult> type(m, "QwenForwardResult",
                                 "One slot's pass: top_token comes after token, drawn as the "
                                 "options say. logits: float32 [vocab], or empty.");
  keywords(type);
  type.def_readwrite("token", &ForwardResult::token)
      .def_readwrite("layers", &ForwardResult::layers)
      .def_readwrite("dim", &ForwardResult::dim)
      .def_property(
          "logits",
          [](const ForwardResult& self) {
            return py::array_t<float>(static_cast<py::ssize_t>(self.logits.size()),
                                      self.logits.data());
          },
          [](ForwardResult& self, std::vector<float> logits) { self.logits = std::move(logits); })
      .def_readwrite("top_token", &ForwardResult::top_token)
      .def_readwrite("top_logit", &ForwardResult::top_logit)
      .def_readwrite("checksum", &ForwardResult::checksum)
      .def_readwrite("position", &ForwardResult::position);
  // Of speculative decoding, which there is none of.
  for (const char* const name : {"correct_drafts", "proposed_drafts"}) {
    type.def_property_readonly(name, constant(0));
  }
  type.def_property_readonly("bonus_token", constant(-1))
      .def_property_readonly("rolled_back", constant(false));
  for (const char* const name : {"accept_tokens", "accept_logits", "accept_checksums"}) {
    type.def_property_readonly(name, [](const py::object&) { return py::list(); });
  }
  type.def("as_dict", [](const py::object& self) {
    py::dict out;
    for (const char* const name :
         {"token", "layers", "dim", "logits", "top_token", "correct_drafts", "proposed_drafts",
          "bonus_token", "rolled_back", "accept_tokens", "accept_logits", "accept_checksums",
          "top_logit", "checksum", "position"}) {
      out[name] = self.attr(name);
    }
    return out;
  });
}

void bind_batches(py::module_& m) {
  py::class_<RequestSampling> sampling(m, "SamplingParams",
                                       "How one request's tokens are drawn; greedy by default.");
  keywords(sampling);
  sampling.def_readwrite("temperature", &RequestSampling::temperature)
      .def_readwrite("top_p", &RequestSampling::top_p)
      .def_readwrite("top_k", &RequestSampling::top_k)
      .def_readwrite("seed", &RequestSampling::seed)
      .def_property(
          "greedy", [](const RequestSampling& self) { return self.temperature <= 1e-5F; },
          [](RequestSampling& self, bool greedy) {
            self.temperature = greedy ? 0.0F : std::max(self.temperature, 1.0F);
          });

  py::class_<BatchedRequest> request(m, "BatchedRequest",
                                     "A request as scheduler and engine pass it on.");
  keywords(request);
  request.def_readwrite("request_id", &BatchedRequest::request_id)
      .def_readwrite("prompt_tokens", &BatchedRequest::prompt_tokens)
      .def_readwrite("seq_len", &BatchedRequest::seq_len)
      .def_readwrite("slot_id", &BatchedRequest::slot_id)
      .def_readwrite("cached_prefix_len", &BatchedRequest::cached_prefix_len)
      .def_readwrite("chunk", &BatchedRequest::chunk)
      .def_readwrite("finished", &BatchedRequest::finished)
      .def_readwrite("last_token", &BatchedRequest::last_token)
      .def_readwrite("generated_tokens", &BatchedRequest::generated_tokens)
      .def_readwrite("sampling", &BatchedRequest::sampling);

  py::class_<BatchPrefillResult> prefill(m, "BatchPrefillResult",
                                         "One QwenForwardResult per request, and whether part of "
                                         "its prompt is still to compute.");
  keywords(prefill);
  prefill.def_readwrite("results", &BatchPrefillResult::results)
      .def_readwrite("incomplete", &BatchPrefillResult::incomplete)
      .def_readwrite("total_tokens", &BatchPrefillResult::total_tokens)
      .def_readwrite("seconds", &BatchPrefillResult::seconds);

  py::class_<BatchDecodeResult> decode(m, "BatchDecodeResult", "The next token of each request.");
  keywords(decode);
  decode.def_readwrite("next_tokens", &BatchDecodeResult::next_tokens)
      .def_readwrite("seconds", &BatchDecodeResult::seconds)
      .def_property_readonly("emitted_tokens",
                             [](const BatchDecodeResult& self) {
                               std::vector<std::vector<std::int32_t>> out;
                               for (const std::int32_t token : self.next_tokens) {
                                 out.push_back({token});
                               }
                               return out;
                             })
      .def_property_readonly("position_advances",
                             [](const BatchDecodeResult& self) {
                               return std::vector<int>(self.next_tokens.size(), 1);
                             })
      .def_property_readonly("logprobs", [](const BatchDecodeResult&) { return py::list(); })
      .def_property_readonly("used_speculative", constant(false))
      .def_property_readonly("rolled_back", constant(false))
      .def_property_readonly("proposed_drafts", constant(0))
      .def_property_readonly("accepted_drafts", constant(0));
}

std::vector<BatchedRequest*> pointers(std::vector<BatchedRequest*> requests) {
  for (const BatchedRequest* const request : requests) {
    if (request == nullptr) {
      throw Error(ErrorCode::kInvalidArgument, "requests: must be BatchedRequest, got None");
    }
  }
  return requests;
}

}  // namespace

void bind_inference_engine(py::module_& m) {
  bind_capabilities(m);
  bind_forward_result(m);
  bind_batches(m);
  using E = InferenceEngine;
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  // Reading may wait for a step under way on another thread.
  const auto read = [](auto member) {
    return [member](const E& self) {
      const py::gil_scoped_release release;
      return (self.*member)();
    };
  };
  py::class_<InferenceEngine, PyInferenceEngine>(m, "InferenceEngine",
                                                 R"(What QwenBatchScheduler needs of an engine.

A subclass calls super().__init__() and defines caps and max_context (attributes, properties or
methods), allocate_slot() -> int | None, free_slot(slot), batch_prefill(requests, token_budget) ->
BatchPrefillResult and batch_decode_step(requests) -> BatchDecodeResult; it may define the kv_...
numbers, eos_token_ids and vocab_size. The scheduler calls them on its own thread; an exception
fails the step's requests.)")
      .def(py::init<>())
      .def_property_readonly("caps", read(&E::caps))
      .def_property_readonly("max_context", read(&E::max_context))
      .def_property_readonly("device", read(&E::device))
      .def_property_readonly("vocab_size", read(&E::vocab_size))
      .def_property_readonly("eos_token_ids", read(&E::eos_token_ids))
      .def_property_readonly("max_prefill_tokens", read(&E::max_prefill_tokens))
      .def_property_readonly("kv_paged", read(&E::kv_paged))
      .def_property_readonly("kv_free_blocks", read(&E::kv_free_blocks))
      .def_property_readonly("kv_total_blocks", read(&E::kv_total_blocks))
      .def_property_readonly("kv_cache_pinned_blocks", read(&E::kv_cache_pinned_blocks))
      .def("kv_evict_cache_blocks", &E::kv_evict_cache_blocks, py::arg("count"), free_gil)
      .def("kv_blocks_for_tokens", &E::kv_blocks_for_tokens, py::arg("tokens"), free_gil)
      .def("allocate_slot", &E::allocate_slot, "An empty slot, or None.", free_gil)
      .def("allocate_batch_slots", &E::allocate_batch_slots, py::arg("count"), free_gil)
      .def("free_slot", &E::free_slot, py::arg("slot_id"), free_gil)
      .def(
          "batch_prefill",
          [](E& self, std::vector<BatchedRequest*> requests, std::size_t token_budget) {
            requests = pointers(std::move(requests));
            const py::gil_scoped_release release;
            return self.batch_prefill(requests, token_budget);
          },
          "Compute prompts, in order, up to token_budget tokens together.", py::arg("requests"),
          py::arg("token_budget"))
      .def(
          "batch_decode_step",
          [](E& self, std::vector<BatchedRequest*> requests) {
            requests = pointers(std::move(requests));
            const py::gil_scoped_release release;
            return self.batch_decode_step(requests);
          },
          "Compute each request's last_token; the next one of each.", py::arg("requests"))
      .def("warmup_tp", [](E&) {}, "Does nothing: there are no other ranks.");
}

}  // namespace pocket::python
