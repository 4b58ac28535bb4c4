#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "buffer_plan.h"
#include "pocket/base/thread_pool.h"
#include "pocket/cpu/kernels.h"
#include "pocket/models/model_info.h"

namespace pocket {

/// What the layers compute with. Pointers are never null; the objects outlive the model.
struct Compute {
  const KernelTable* kernels;
  ThreadPool* pool;
  Precision precision;
};

/// The forms in which a layer's weights want their input rows.
struct InputForm {
  bool floats = false;
  bool quantised = false;
  bool half_sums = false;  ///< of quantised rows: QuantisedRows::half_bias

  friend InputForm operator|(InputForm a, InputForm b) {
    return {a.floats || b.floats, a.quantised || b.quantised, a.half_sums || b.half_sums};
  }
};

/// Float layouts (F32, F16, BF16 tensors) are multiplied in float32 at either precision.
[[nodiscard]] inline InputForm input_form(const PackedMatrix& w, Precision precision) noexcept {
  const bool integer = w.quantised() && precision == Precision::kInt8;
  return {.floats = !integer, .quantised = integer, .half_sums = integer && w.coded()};
}

/// Rows of activations in the forms that their consumers want; arrays of unused forms are null.
/// Quantised rows are interleaved, so their writers and readers must agree on `quantised.rows`:
/// `set_rows` before the first is written.
struct Activations {
  std::size_t columns = 0;
  float* values = nullptr;  ///< [rows, columns]
  QuantisedRows quantised{};

  void set_rows(std::size_t rows) noexcept { quantised.rows = rows; }
};

/// Offsets of an `Activations` in an arena, before and after allocation.
class ActivationsPlan {
 public:
  ActivationsPlan() = default;
  ActivationsPlan(BufferPlan& plan, std::size_t rows, std::size_t columns, InputForm form);
  [[nodiscard]] Activations bind(AlignedBuffer& arena) const;

 private:
  std::size_t rows_ = 0;
  std::size_t columns_ = 0;
  InputForm form_;
  std::size_t values_ = 0;
  std::size_t q_ = 0;
  std::size_t scale_ = 0;
  std::size_t scaled_sum_ = 0;
  std::size_t negative_sum_ = 0;
  std::size_t half_bias_ = 0;
};

}  // namespace pocket
