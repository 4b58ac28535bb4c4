// class LogitEdits: one request's bias, penalties and forbidden ids, with its token history.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "py_logit_edits.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

std::vector<std::int32_t> ids(const py::object& array, const char* name) {
  if (array.is_none()) {
    return {};
  }
  const auto span = view<std::int32_t>(array, name);
  return {span.begin(), span.end()};
}

std::unique_ptr<PyLogitEdits> make_edits(std::size_t vocab, float repetition_penalty,
                                         float presence_penalty, float frequency_penalty,
                                         const py::object& bias_tokens,
                                         const py::object& bias_values, const py::object& banned,
                                         const py::object& ending, std::uint64_t min_tokens) {
  LogitOptions options{.repetition_penalty = repetition_penalty,
                       .presence_penalty = presence_penalty,
                       .frequency_penalty = frequency_penalty,
                       .bias = {},
                       .banned = ids(banned, "banned"),
                       .ending = ids(ending, "ending"),
                       .min_tokens = min_tokens};
  const std::vector<std::int32_t> tokens = ids(bias_tokens, "bias_tokens");
  std::span<const float> values;
  if (!bias_values.is_none()) {
    values = view<float>(bias_values, "bias_values");
  }
  if (values.size() != tokens.size()) {
    throw py::value_error("bias_values: has " + std::to_string(values.size()) +
                          " entries; bias_tokens has " + std::to_string(tokens.size()));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    options.bias.push_back({tokens[i], values[i]});
  }
  return std::make_unique<PyLogitEdits>(std::move(options), vocab);
}

constexpr const char* kEditsDoc =
    R"(What one request does to its logits, and the tokens it has seen.

For Engine.step's `edits`. bias_tokens, banned, ending: int32 arrays of ids below vocab, which must
be the model's vocabulary; bias_values: float32. The owner keeps the history complete, with
reset_history when the sequence (re)starts and append for every further output token.

Raises InvalidArgument naming the field; also for a change while a step reads the edits.)";

}  // namespace

void bind_logit_edits(py::module_& m) {
  py::class_<PyLogitEdits>(m, "LogitEdits", kEditsDoc)
      .def(py::init(&make_edits), py::arg("vocab"), py::kw_only(),
           py::arg("repetition_penalty") = 1.0F, py::arg("presence_penalty") = 0.0F,
           py::arg("frequency_penalty") = 0.0F, py::arg("bias_tokens") = py::none(),
           py::arg("bias_values") = py::none(), py::arg("banned") = py::none(),
           py::arg("ending") = py::none(), py::arg("min_tokens") = 0)
      .def(
          "reset_history",
          [](PyLogitEdits& self, const py::object& tokens, std::size_t num_prompt) {
            self.write().reset_history(view<std::int32_t>(tokens, "tokens"), num_prompt);
          },
          "Start over with these tokens (int32), the first num_prompt of which are the prompt.",
          py::arg("tokens"), py::arg("num_prompt"))
      .def(
          "append", [](PyLogitEdits& self, std::int32_t token) { self.write().append(token); },
          "One more output token.", py::arg("token"))
      .def_property_readonly(
          "length", [](const PyLogitEdits& self) { return self.read().length(); },
          "Tokens known: prompt and output.");
}

}  // namespace pocket::python
