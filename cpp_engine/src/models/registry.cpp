// The one list of model architectures. A new model adds its factory here.

#include <algorithm>
#include <array>
#include <string_view>

#include "architectures.h"
#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/models/model.h"

namespace pocket {
namespace {

struct Architecture {
  std::string_view name;  // GGUF's general.architecture
  std::unique_ptr<Model> (*make)(const WeightSource&, const ModelOptions&);
  ModelInfo (*describe)(const WeightSource&);
};

constexpr std::array kArchitectures{
    Architecture{"llama", make_llama, describe_llama},
    Architecture{"gemma3", make_gemma3, describe_gemma3},
    Architecture{"qwen2", make_qwen2, describe_qwen2},
    Architecture{"qwen3", make_qwen3, describe_qwen3},
    Architecture{"qwen2moe", make_qwen2moe, describe_qwen2moe},
    Architecture{"qwen3moe", make_qwen3moe, describe_qwen3moe},
    Architecture{"qwen35", make_qwen35, describe_qwen35},
    Architecture{"qwen35moe", make_qwen35moe, describe_qwen35moe},
    Architecture{"qwen3next", make_qwen3next, describe_qwen3next},
};

const Architecture& find_architecture(const WeightSource& source) {
  const std::string wanted = source.architecture();
  std::string supported;
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == wanted) {
      return architecture;
    }
    supported += (supported.empty() ? "" : ", ") + std::string(architecture.name);
  }
  throw Error(ErrorCode::kUnsupported, source.name() + ": architecture " + quoted(wanted) +
                                           " is not supported; supported: " + supported);
}

}  // namespace

std::vector<std::string> supported_architectures() {
  std::vector<std::string> names;
  for (const Architecture& architecture : kArchitectures) {
    names.emplace_back(architecture.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::unique_ptr<Model> load_model(const WeightSource& source, const ModelOptions& options) {
  return find_architecture(source).make(source, options);
}

ModelInfo describe_model(const WeightSource& source) {
  return find_architecture(source).describe(source);
}

}  // namespace pocket
