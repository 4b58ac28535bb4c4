// QwenEngineOptions and its parts: the older interface's names, each either honoured or refused.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "bindings.h"
#include "pocket/base/error.h"
#include "pocket/models/model.h"
#include "pocket/models/weight_source.h"
#include "py_qwen_options.h"

namespace py = pybind11;

namespace pocket::python {
namespace {

enum class NvFp4Mode : std::uint8_t { kAuto, kDp4a, kWmma, kReference };
enum class OptionalSwitch : std::uint8_t { kAuto, kDisabled, kEnabled };

constexpr std::array<std::string_view, 17> kKernelNames{"nvfp4_mode",
                                                        "nvfp4_wide_n64",
                                                        "nvfp4_wide_n64_min_rows",
                                                        "nvfp4_fused_swiglu",
                                                        "nvfp4_shared_q8_swiglu",
                                                        "gqa_optimized",
                                                        "gqa_verify_cublas_qk",
                                                        "gqa_verify_split",
                                                        "gqa_verify_splits",
                                                        "verify_small_fp16_cublas",
                                                        "gated_delta_flashqla",
                                                        "fuse_qkvz_decode",
                                                        "fuse_ab_projection",
                                                        "gated_delta_prenormalize",
                                                        "gated_delta_shared_state",
                                                        "fuse_full_qkv_decode",
                                                        "comm_overlap_slices"};
constexpr std::string_view kLastKernelName = "fuse_attention_residual_norm";

bool is_kernel_name(std::string_view name) {
  return name == kLastKernelName ||
         std::find(kKernelNames.begin(), kKernelNames.end(), name) != kKernelNames.end();
}

py::object kernel_get(const PyKernelOptions& self, const std::string& name) {
  if (!is_kernel_name(name)) {
    throw py::attribute_error("QwenKernelOptions has no option " + name);
  }
  const auto found = self.values.find(name);
  return found == self.values.end() ? py::cast(OptionalSwitch::kAuto) : found->second;
}

void kernel_set(PyKernelOptions& self, const std::string& name, const py::object& value) {
  if (!is_kernel_name(name)) {
    throw py::attribute_error("QwenKernelOptions has no option " + name);
  }
  const bool automatic = value.is_none() || value.equal(py::cast(OptionalSwitch::kAuto)) ||
                         value.equal(py::cast(NvFp4Mode::kAuto));
  if (automatic) {
    self.values.erase(name);
  } else {
    self.values.insert_or_assign(name, value);
  }
}

// A member that is a count: refused by name unless it is an integer that fits.
template <typename T>
void count(py::class_<PyQwenOptions>& type, const char* name, T QwenEngineOptions::* member) {
  type.def_property(
      name, [member](const PyQwenOptions& self) { return self.native.*member; },
      [member, name](PyQwenOptions& self, const py::object& value) {
        const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
        if (!index) {
          PyErr_Clear();
          throw py::type_error(std::string(name) + ": must be an integer");
        }
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
        constexpr long long low = std::is_signed_v<T> ? std::numeric_limits<T>::min() : 0;
        const bool fits = overflow == 0 && number >= low &&
                          (sizeof(T) == 8 || number <= std::numeric_limits<std::int32_t>::max());
        if (!fits) {
          throw Error(ErrorCode::kInvalidArgument,
                      std::string(name) + ": got " + std::string(py::str(index)).substr(0, 32) +
                          "; must be an integer from " + std::to_string(low));
        }
        self.native.*member = static_cast<T>(number);
      });
}

template <typename T>
void plain(py::class_<PyQwenOptions>& type, const char* name, T QwenEngineOptions::* member) {
  type.def_property(
      name, [member](const PyQwenOptions& self) { return self.native.*member; },
      [member](PyQwenOptions& self, T value) { self.native.*member = std::move(value); });
}

void bind_enums(py::module_& m) {
  py::enum_<QwenKvCacheDType>(m, "QwenKvCacheDType")
      .value("Fp16", QwenKvCacheDType::kFp16)
      .value("Fp8", QwenKvCacheDType::kFp8)
      .value("TurboQuantK8V4", QwenKvCacheDType::kTurboQuantK8V4)
      .value("Int8PerTokenHead", QwenKvCacheDType::kInt8PerTokenHead);
  py::enum_<NvFp4Mode>(m, "NvFp4Mode")
      .value("Auto", NvFp4Mode::kAuto)
      .value("Dp4a", NvFp4Mode::kDp4a)
      .value("Wmma", NvFp4Mode::kWmma)
      .value("Reference", NvFp4Mode::kReference);
  py::enum_<OptionalSwitch>(m, "OptionalSwitch")
      .value("Auto", OptionalSwitch::kAuto)
      .value("Disabled", OptionalSwitch::kDisabled)
      .value("Enabled", OptionalSwitch::kEnabled);
  m.def("qwen_kv_cache_dtype_name", &qwen_kv_cache_dtype_name, py::arg("dtype"));
  m.def("parse_qwen_kv_cache_dtype", &parse_qwen_kv_cache_dtype, py::arg("name"));
}

void bind_options(py::module_& m) {
  py::class_<PyQwenOptions> type(m, "QwenEngineOptions", R"(Options of QwenEngine.

Names are the older interface's. Those of features that this engine does not have keep their
defaults; QwenEngine raises UnsupportedFeatureError naming any other value. Our own: threads (0: the
CPUs of the process), precision ("int8" or "f32").)");
  type.def(py::init([](const py::kwargs& values) {
    auto options = std::make_unique<PyQwenOptions>();
    const py::object self = py::cast(options.get(), py::return_value_policy::reference);
    for (const auto& [name, value] : values) {
      py::setattr(self, name, value);
    }
    return *options;
  }));
  using O = QwenEngineOptions;
  count(type, "tp_world", &O::tp_world);
  count(type, "tp_rank", &O::tp_rank);
  count(type, "device", &O::device);
  count(type, "max_batch_size", &O::max_batch_size);
  count(type, "prefill_chunk_tokens", &O::prefill_chunk_tokens);
  count(type, "attention_window", &O::attention_window);
  count(type, "attention_sink_tokens", &O::attention_sink_tokens);
  count(type, "state_snapshot_interval_tokens", &O::state_snapshot_interval_tokens);
  count(type, "max_state_snapshots", &O::max_state_snapshots);
  count(type, "mtp_speculative_tokens", &O::mtp_speculative_tokens);
  count(type, "kv_block_size", &O::kv_block_size);
  count(type, "kv_cache_bytes", &O::kv_cache_bytes);
  count(type, "prefix_cache_bytes", &O::prefix_cache_bytes);
  count(type, "top_k", &O::top_k);
  count(type, "sampling_seed", &O::sampling_seed);
  count(type, "threads", &O::threads);
  plain(type, "prefix_cache", &O::prefix_cache);
  plain(type, "mtp", &O::mtp);
  plain(type, "mtp_adaptive", &O::mtp_adaptive);
  plain(type, "kv_paged", &O::kv_paged);
  plain(type, "dspark_checkpoint", &O::dspark_checkpoint);
  plain(type, "dflash2_checkpoint", &O::dflash2_checkpoint);
  plain(type, "nccl_id_path", &O::nccl_id_path);
  plain(type, "temperature", &O::temperature);
  plain(type, "top_p", &O::top_p);
  type.def_property(
      "kv_cache_dtype", [](const PyQwenOptions& self) { return self.native.kv_cache_dtype; },
      [](PyQwenOptions& self, const std::variant<QwenKvCacheDType, std::string>& value) {
        self.native.kv_cache_dtype = std::holds_alternative<std::string>(value)
                                         ? parse_qwen_kv_cache_dtype(std::get<std::string>(value))
                                         : std::get<QwenKvCacheDType>(value);
      });
  type.def_property(
      "precision",
      [](const PyQwenOptions& self) {
        return self.native.precision == Precision::kInt8 ? "int8" : "f32";
      },
      [](PyQwenOptions& self, const std::string& name) {
        if (name != "int8" && name != "f32") {
          throw Error(ErrorCode::kInvalidArgument,
                      "precision: got '" + name.substr(0, 32) + "'; must be int8 or f32");
        }
        self.native.precision = name == "int8" ? Precision::kInt8 : Precision::kExactF32;
      });
  type.def_readwrite("kernel", &PyQwenOptions::kernel);
}

std::string detect_architecture(const std::filesystem::path& model) {
  const py::gil_scoped_release release;
  return open_weight_source(model.string())->architecture();
}

}  // namespace

QwenEngineOptions checked_options(const PyQwenOptions& options) {
  if (!options.kernel.values.empty()) {
    throw UnsupportedFeature("kernel." + options.kernel.values.begin()->first,
                             "it chooses between CUDA kernels");
  }
  return options.native;
}

void bind_qwen_options(py::module_& m) {
  bind_enums(m);
  py::class_<PyKernelOptions>(m, "QwenKernelOptions",
                              "Choices between CUDA kernels: all automatic, others are refused.")
      .def(py::init<>())
      .def("__getattr__", &kernel_get, py::arg("name"))
      .def("__setattr__", &kernel_set, py::arg("name"), py::arg("value"))
      .def("load_from_env", [](const PyKernelOptions&) {
        throw UnsupportedFeature("QwenKernelOptions.load_from_env",
                                 "there are no CUDA kernels to choose");
      });
  bind_options(m);
  m.attr("backend") = "cpu";
  m.def("registered_architectures", &supported_architectures,
        "Architectures with a model, sorted, as GGUF names them.");
  m.def("detect_architecture", &detect_architecture,
        "Architecture of a GGUF file or a Hugging Face directory; raises as Engine does.",
        py::arg("checkpoint"));
  m.def(
      "is_qwen3_5_checkpoint",
      [](const std::filesystem::path& model) {
        try {
          return detect_architecture(model).starts_with("qwen35");
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kUnsupported) {
            throw;
          }
          return false;
        }
      },
      py::arg("checkpoint"));
}

}  // namespace pocket::python
