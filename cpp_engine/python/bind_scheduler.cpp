// class QwenBatchScheduler: the native scheduler's thread, its callbacks under the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/runtime/batch_scheduler.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How often a poll looks for signals (Ctrl-C).
constexpr milliseconds kSignalInterval{100};

// A Python object that any thread may drop.
std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// Calls with the GIL. An exception is reported as unraisable, and then told to the scheduler.
template <typename... Arguments>
void call(const py::object& function, const Arguments&... arguments) {
  try {
    function(arguments...);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable(function);
    throw std::runtime_error("a callback raised");
  }
}

// Whether a function can be called with two arguments (request id and token), or one (the token).
bool takes_two(const py::object& function) {
  const py::module_ inspect = py::module_::import("inspect");
  try {
    inspect.attr("signature")(function).attr("bind")(0, 0);
    return true;
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_ValueError)) {
      return true;  // a builtin that does not say
    }
    if (error.matches(PyExc_TypeError)) {
      return false;
    }
    throw;
  }
}

py::object callable(const py::object& object, const char* name) {
  if (!object.is_none() && PyCallable_Check(object.ptr()) == 0) {
    throw py::type_error(std::string(name) + ": must be callable or None");
  }
  return object;
}

// Those that `stop_all` has to stop; under the GIL.
std::vector<std::weak_ptr<QwenBatchScheduler>> alive;

// Before Python ends: afterwards nobody could take the GIL for a callback.
void stop_all() {
  for (const auto& known : std::exchange(alive, {})) {
    if (const auto scheduler = known.lock()) {
      const py::gil_scoped_release release;
      scheduler->stop();
    }
  }
}

/// The Python object. It may be dropped by any thread, one of its own callbacks included.
class PyScheduler {
 public:
  PyScheduler(const py::object& engine, std::size_t max_batch_size)
      : engine_(engine),
        scheduler_(
            std::make_shared<QwenBatchScheduler>(engine.cast<InferenceEngine&>(), max_batch_size)) {
    std::erase_if(alive, [](const auto& scheduler) { return scheduler.expired(); });
    alive.push_back(scheduler_);
  }
  PyScheduler(const PyScheduler&) = delete;
  PyScheduler& operator=(const PyScheduler&) = delete;

  ~PyScheduler() {
    if (scheduler_->in_callback()) {
      // Its thread cannot wait for itself. The engine has to outlive it, hence both go along.
      std::thread([scheduler = std::move(scheduler_),
                   engine = shared(std::move(engine_))]() mutable {
        scheduler.reset();
        engine.reset();
      }).detach();
      return;
    }
    const py::gil_scoped_release release;  // its callbacks need it to come to an end
    scheduler_.reset();
  }

  std::uint64_t submit(const std::vector<std::int32_t>& prompt, const BatchSamplingParams* sampling,
                       const py::object& callback, const py::object& on_token) {
    QwenBatchScheduler::Callback finished;
    QwenBatchScheduler::TokenCallback token;
    if (!callable(callback, "callback").is_none()) {
      finished = [function = shared(callback)](const SchedulerResult& result) {
        const py::gil_scoped_acquire gil;
        call(*function, result);
      };
    }
    if (!callable(on_token, "on_token").is_none()) {
      token = [function = shared(on_token), two = takes_two(on_token)](std::uint64_t id,
                                                                       std::int32_t value) {
        const py::gil_scoped_acquire gil;
        two ? call(*function, id, value) : call(*function, value);
      };
    }
    const BatchSamplingParams params = sampling == nullptr ? BatchSamplingParams{} : *sampling;
    const py::gil_scoped_release release;
    return scheduler_->submit(prompt, params, std::move(finished), std::move(token));
  }

  std::optional<SchedulerResult> poll(std::uint64_t id, std::optional<std::int64_t> timeout_ms) {
    if (timeout_ms && *timeout_ms < 0) {
      throw Error(ErrorCode::kInvalidArgument, "timeout_ms: got " + std::to_string(*timeout_ms) +
                                                   "; must be 0 or more, or None to wait");
    }
    const bool waits = !scheduler_->in_callback();
    const Clock::time_point start = Clock::now();
    for (;;) {
      milliseconds slice = waits ? kSignalInterval : milliseconds(0);
      if (timeout_ms) {
        const auto passed = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
        slice = std::clamp(milliseconds(*timeout_ms) - passed, milliseconds(0), slice);
      }
      std::optional<SchedulerResult> result;
      {
        const py::gil_scoped_release release;
        result = scheduler_->poll(id, slice);
      }
      if (result || slice == milliseconds(0)) {
        return result;
      }
      if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
      }
    }
  }

  QwenBatchScheduler& native() const { return *scheduler_; }

 private:
  py::object engine_;
  std::shared_ptr<QwenBatchScheduler> scheduler_;
};

void bind_values(py::module_& m) {
  using P = BatchSamplingParams;
  py::class_<P>(m, "QwenBatchSamplingParams",
                "How a request's tokens are drawn and when it ends; greedy by default.")
      .def(py::init([](float temperature, float top_p, std::int32_t top_k, std::uint64_t seed,
                       std::size_t max_new_tokens, std::vector<std::int32_t> stop_token_ids,
                       bool ignore_eos) {
             P made;
             made.temperature = temperature;
             made.top_p = top_p;
             made.top_k = top_k;
             made.seed = seed;
             made.max_new_tokens = max_new_tokens;
             made.stop_token_ids = std::move(stop_token_ids);
             made.ignore_eos = ignore_eos;
             return made;
           }),
           py::arg("temperature") = 0.0F, py::arg("top_p") = 1.0F, py::arg("top_k") = 0,
           py::arg("seed") = 0, py::arg("max_new_tokens") = 128,
           py::arg("stop_token_ids") = std::vector<std::int32_t>{}, py::arg("ignore_eos") = false)
      .def_readwrite("temperature", &P::temperature)
      .def_readwrite("top_p", &P::top_p)
      .def_readwrite("top_k", &P::top_k)
      .def_readwrite("seed", &P::seed)
      .def_readwrite("max_new_tokens", &P::max_new_tokens)
      .def_readwrite("stop_token_ids", &P::stop_token_ids)
      .def_readwrite("ignore_eos", &P::ignore_eos);

  using R = SchedulerResult;
  py::class_<R> result(m, "SchedulerGenerationResult",
                       "How a request ended: finish_reason stop, length, cancelled or error.");
  result.def_readonly("request_id", &R::request_id)
      .def_readonly("generated_tokens", &R::generated_tokens)
      .def_readonly("finish_reason", &R::finish_reason)
      .def_readonly("prompt_tokens", &R::prompt_tokens)
      .def_readonly("cached_tokens", &R::cached_tokens)
      .def_readonly("preemptions", &R::preemptions)
      .def_readonly("total_seconds", &R::total_seconds)
      .def_readonly("ttft_seconds", &R::ttft_seconds)
      .def_readonly("queue_seconds", &R::queue_seconds)
      .def_readonly("prefill_seconds", &R::prefill_seconds)
      .def_readonly("decode_seconds", &R::decode_seconds)
      .def_readonly("error", &R::error)
      .def_property_readonly("completion_tokens",
                             [](const R& self) { return self.generated_tokens.size(); })
      .def_property_readonly("constraint_completed", [](const R&) { return false; });
  for (const char* const name :
       {"proposed_drafts", "accepted_drafts", "speculative_steps", "rollback_steps"}) {
    result.def_property_readonly(name, [](const R&) { return 0; });
  }

  using S = SchedulerStats;
  py::class_<S>(m, "QwenBatchSchedulerStats", "Requests, slots and KV blocks at one moment.")
      .def_readonly("waiting_requests", &S::waiting_requests)
      .def_readonly("running_requests", &S::running_requests)
      .def_readonly("completed_requests", &S::completed_requests)
      .def_readonly("cancelled_requests", &S::cancelled_requests)
      .def_readonly("failed_requests", &S::failed_requests)
      .def_readonly("preemptions", &S::preemptions)
      .def_readonly("callback_errors", &S::callback_errors)
      .def_readonly("free_slots", &S::free_slots)
      .def_readonly("reserved_blocks", &S::reserved_blocks)
      .def_readonly("total_blocks", &S::total_blocks)
      .def_readonly("free_blocks", &S::free_blocks)
      .def_readonly("cache_pinned_blocks", &S::cache_pinned_blocks);
}

}  // namespace

void bind_scheduler(py::module_& m) {
  bind_values(m);
  py::module_::import("atexit").attr("register")(py::cpp_function(&stop_all));
  using S = PyScheduler;
  py::class_<S>(m, "QwenBatchScheduler", R"(Continuous batching on a native thread.

QwenBatchScheduler(engine, max_batch_size): over a QwenEngine, or any InferenceEngine. Slots and KV
blocks are taken and given back by itself; prompts are computed in chunks, together with everybody's
next token; requests share the KV blocks of a common beginning.

callback(result) runs once, when the request has ended; on_token(request_id, token) -- or
on_token(token), if the function takes one argument -- with each token. Both run on the scheduler's
thread, between two steps: be quick. What they raise is reported as unraisable and changes nothing.

Raises InvalidArgument naming the field, ResourceExhausted when too many requests are open.)")
      .def(py::init<py::object, std::size_t>(), py::arg("engine"), py::arg("max_batch_size"))
      .def("submit_request", &S::submit, "Queue a request; its id.", py::arg("prompt_tokens"),
           py::arg("sampling") = py::none(), py::arg("callback") = py::none(),
           py::arg("on_token") = py::none())
      .def(
          "cancel_request",
          [](S& self, std::uint64_t id) {
            const py::gil_scoped_release release;
            return self.native().cancel(id);
          },
          "End a request in any state; False if it has ended or never was.", py::arg("request_id"))
      .def("poll_result", &S::poll,
           "The result, or None if the request has not ended after timeout_ms (None: wait). A "
           "result can be polled again; the oldest are forgotten.",
           py::arg("request_id"), py::arg("timeout_ms") = 30000)
      .def("get_stats",
           [](S& self) {
             const py::gil_scoped_release release;
             return self.native().stats();
           })
      .def("is_running", [](S& self) { return self.native().is_running(); })
      .def(
          "stop",
          [](S& self) {
            const py::gil_scoped_release release;
            self.native().stop();
          },
          "Cancel what is open and end the thread. Idempotent.")
      .def("engine_caps", [](S& self) { return self.native().engine_caps(); })
      .def_property_readonly("max_batch_size",
                             [](S& self) { return self.native().max_batch_size(); })
      .def(
          "set_prefill_token_budget",
          [](S& self, std::size_t tokens) { self.native().set_prefill_token_budget(tokens); },
          "Prompt tokens per step, over all requests.", py::arg("tokens"))
      .def_property(
          "prefill_token_budget", [](S& self) { return self.native().prefill_token_budget(); },
          [](S& self, std::size_t tokens) { self.native().set_prefill_token_budget(tokens); })
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](S& self, const py::args&) {
        const py::gil_scoped_release release;
        self.native().stop();
      });
}

}  // namespace pocket::python
