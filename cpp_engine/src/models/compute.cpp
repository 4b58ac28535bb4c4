#include "compute.h"

namespace pocket {

ActivationsPlan::ActivationsPlan(BufferPlan& plan, std::size_t rows, std::size_t columns,
                                 InputForm form)
    : rows_(rows), columns_(columns), form_(form) {
  if (form.floats) {
    values_ = plan.add<float>(rows * columns);
  }
  if (form.quantised) {
    const std::size_t blocks = rows * columns / kQuantBlock;
    q_ = plan.add<std::int8_t>(rows * columns);
    scale_ = plan.add<float>(blocks);
    scaled_sum_ = plan.add<float>(blocks);
    negative_sum_ = plan.add<std::int32_t>(blocks);
    if (form.half_sums) {
      half_bias_ = plan.add<std::int32_t>(2 * blocks);
    }
  }
}

Activations ActivationsPlan::bind(AlignedBuffer& arena) const {
  Activations bound{.columns = columns_};
  if (form_.floats) {
    bound.values = arena.view<float>(values_, rows_ * columns_).data();
  }
  if (form_.quantised) {
    const std::size_t blocks = rows_ * columns_ / kQuantBlock;
    bound.quantised = {.q = arena.view<std::int8_t>(q_, rows_ * columns_).data(),
                       .scale = arena.view<float>(scale_, blocks).data(),
                       .scaled_sum = arena.view<float>(scaled_sum_, blocks).data(),
                       .negative_sum = arena.view<std::int32_t>(negative_sum_, blocks).data(),
                       .half_bias = form_.half_sums
                                        ? arena.view<std::int32_t>(half_bias_, 2 * blocks).data()
                                        : nullptr,
                       .columns = columns_,
                       .rows = 0};
  }
  return bound;
}

}  // namespace pocket
