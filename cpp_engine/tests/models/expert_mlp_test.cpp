#include "layers/expert_mlp.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "allocation_count.h"
#include "decoder_workspace.h"
#include "layers/gated_mlp.h"
#include "layers/linear.h"
#include "memory_source.h"

namespace pocket {
namespace {

using test::MemorySource;

constexpr std::size_t kHidden = 64, kExperts = 7, kFfn = 96, kShared = 32, kRows = 80;
constexpr const char* kPrefix = "blk.0.";

std::vector<float> random_floats(std::size_t count, unsigned seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

/// One layer's weights [rows, columns] by their names in a file with stacks.
struct Tensors {
  std::vector<float> router = random_floats(kExperts * kHidden, 1, 0.3F);
  std::vector<float> gate = random_floats(kExperts * kFfn * kHidden, 2, 0.15F);
  std::vector<float> up = random_floats(kExperts * kFfn * kHidden, 3, 0.15F);
  std::vector<float> down = random_floats(kExperts * kHidden * kFfn, 4, 0.15F);
  std::vector<float> shared_gate = random_floats(kHidden, 5, 0.2F);
  std::vector<float> shared_up = random_floats(kShared * kHidden, 6, 0.15F);
  std::vector<float> shared_down = random_floats(kHidden * kShared, 7, 0.15F);
};

enum class Layout { kStacks, kGateUpStack, kOneByOne };

std::vector<float> slice(const std::vector<float>& values, std::size_t index, std::size_t size) {
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(index * size);
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

MemorySource source_of(const Tensors& t, Layout layout, bool shared) {
  MemorySource source;
  const auto add = [&](const std::string& name, std::vector<std::size_t> shape,
                       std::vector<float> values) {
    source.add(kPrefix + name + ".weight", std::move(shape), std::move(values));
  };
  add("ffn_gate_inp", {kExperts, kHidden}, t.router);
  if (layout == Layout::kOneByOne) {
    for (std::size_t e = 0; e < kExperts; ++e) {
      const std::string number = std::to_string(e);
      add("ffn_gate." + number, {kFfn, kHidden}, slice(t.gate, e, kFfn * kHidden));
      add("ffn_up." + number, {kFfn, kHidden}, slice(t.up, e, kFfn * kHidden));
      add("ffn_down." + number, {kHidden, kFfn}, slice(t.down, e, kFfn * kHidden));
    }
  } else {
    if (layout == Layout::kStacks) {
      add("ffn_gate_exps", {kExperts, kFfn, kHidden}, t.gate);
      add("ffn_up_exps", {kExperts, kFfn, kHidden}, t.up);
    } else {
      std::vector<float> both;
      for (std::size_t e = 0; e < kExperts; ++e) {
        for (const std::vector<float>* part : {&t.gate, &t.up}) {
          const std::vector<float> values = slice(*part, e, kFfn * kHidden);
          both.insert(both.end(), values.begin(), values.end());
        }
      }
      add("ffn_gate_up_exps", {kExperts, 2 * kFfn, kHidden}, both);
    }
    add("ffn_down_exps", {kExperts, kHidden, kFfn}, t.down);
  }
  if (shared) {
    // GGUF has a vector, Hugging Face a matrix of one row.
    add("ffn_gate_inp_shexp",
        layout == Layout::kStacks ? std::vector<std::size_t>{kHidden}
                                  : std::vector<std::size_t>{1, kHidden},
        t.shared_gate);
    add("ffn_gate_shexp", {kShared, kHidden}, slice(t.gate, 1, kShared * kHidden));
    add("ffn_up_shexp", {kShared, kHidden}, t.shared_up);
    add("ffn_down_shexp", {kHidden, kShared}, t.shared_down);
  }
  return source;
}

struct Setting {
  std::size_t used = 3;
  bool shared = true;
  bool normalised = false;
  Layout layout = Layout::kStacks;
  std::optional<DType> weights{};
  Precision precision = Precision::kExactF32;
  Isa isa = Isa::kScalar;
  std::size_t threads = 1;
};

/// A layer with its work space; `run` returns what it adds to zeros.
class Layer {
 public:
  explicit Layer(const Setting& setting, const Tensors& tensors = {})
      : setting_(setting), pool_(setting.threads) {
    config_.hidden = kHidden;
    config_.layers = config_.heads = config_.kv_heads = 1;
    config_.head_dim = kHidden;
    config_.ffn = kFfn;
    config_.experts = {.count = kExperts,
                       .used = setting.used,
                       .ffn = kFfn,
                       .shared_ffn = setting.shared ? kShared : 0,
                       .normalised = setting.normalised,
                       .layers = {true}};
    const MemorySource source = source_of(tensors, setting.layout, setting.shared);
    WeightLoader loader(source, setting.weights);
    mlp_.load(loader, kPrefix, config_);
    weights_ = loader.load(pool_);
    const DecoderWorkspace::Forms forms{.block_input = mlp_.input(setting.precision),
                                        .expert_input = mlp_.gathered(setting.precision),
                                        .expert_inner = mlp_.inner(setting.precision),
                                        .shared_inner = mlp_.shared_inner(setting.precision)};
    const ModelOptions options{.kernels = &kernel_table(setting.isa),
                               .pool = &pool_,
                               .precision = setting.precision,
                               .max_batch_tokens = kRows,
                               .max_sequences = 1,
                               .max_logits_rows = 1};
    workspace_.emplace(config_, options, forms, kPanelRows);
    routing_.emplace(kRows, config_.experts);
  }

  [[nodiscard]] std::vector<float> run(const std::vector<float>& x) {
    DecoderWorkspace& w = *workspace_;
    const std::size_t rows = x.size() / kHidden;
    const Compute compute{&kernel_table(setting_.isa), &pool_, setting_.precision};
    w.set_rows(rows);
    std::copy(x.begin(), x.end(), w.input.values);
    for (std::size_t row = 0; row < rows && w.input.quantised.q != nullptr; ++row) {
      compute.kernels->quantise_row(w.input.values + row * kHidden,
                                    quantised_row(w.input.quantised, row, 0, kHidden));
    }
    std::vector<float> residual(rows * kHidden, 0.0F);
    const std::size_t before = test::allocation_count();
    mlp_.run(compute, w.input, rows, *routing_, w.experts, residual.data(), w.matmul_scratch);
    allocations = test::allocation_count() - before;
    return residual;
  }

  std::size_t allocations = 0;  ///< of the last run

 private:
  Setting setting_;
  ThreadPool pool_;
  DecoderConfig config_;
  ExpertMlp mlp_;
  PackedWeights weights_;
  std::optional<DecoderWorkspace> workspace_;
  std::optional<ExpertRouting> routing_;
};

const std::vector<float>& inputs() {
  static const std::vector<float> values = random_floats(kRows * kHidden, 11, 1.0F);
  return values;
}

std::vector<float> rows_of(std::size_t begin, std::size_t count) {
  const auto first = inputs().begin() + static_cast<std::ptrdiff_t>(begin * kHidden);
  return {first, first + static_cast<std::ptrdiff_t>(count * kHidden)};
}

/// A number and a bound of what float32 arithmetic may have made of it: every sum of n products
/// that are rounded once each is off by at most n 2^-24 times the sum of their magnitudes.
struct Bounded {
  double value = 0.0;
  double error = 0.0;
};

constexpr double kUnit = 1.0 / (1 << 24);

Bounded dot(const float* a, const std::vector<Bounded>& x) {
  Bounded sum;
  double magnitude = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sum.value += static_cast<double>(a[i]) * x[i].value;
    sum.error += std::abs(static_cast<double>(a[i])) * x[i].error;
    magnitude += std::abs(static_cast<double>(a[i]) * x[i].value);
  }
  sum.error += static_cast<double>(x.size()) * kUnit * magnitude;
  return sum;
}

/// A gated MLP of one row. The slope of silu is at most 1.1, and its own evaluation is within a few
/// units in the last place.
std::vector<Bounded> reference_mlp(const float* gate, const float* up, const float* down,
                                   std::size_t ffn, const std::vector<Bounded>& x) {
  std::vector<Bounded> inner(ffn);
  for (std::size_t k = 0; k < ffn; ++k) {
    const Bounded g = dot(gate + k * kHidden, x), u = dot(up + k * kHidden, x);
    const double silu = g.value / (1.0 + std::exp(-g.value));
    inner[k].value = silu * u.value;
    inner[k].error = 1.1 * g.error * std::abs(u.value) + std::abs(silu) * u.error +
                     8 * kUnit * std::abs(inner[k].value);
  }
  std::vector<Bounded> out(kHidden);
  for (std::size_t i = 0; i < kHidden; ++i) {
    out[i] = dot(down + i * ffn, inner);
  }
  return out;
}

std::vector<Bounded> reference_row(const Tensors& t, const Setting& setting, const float* x) {
  std::vector<Bounded> row(kHidden);
  std::transform(x, x + kHidden, row.begin(), [](float value) { return Bounded{value, 0.0}; });
  std::vector<double> probability(kExperts);
  double sum = 0.0, logit_error = 0.0;
  for (std::size_t e = 0; e < kExperts; ++e) {
    const Bounded logit = dot(t.router.data() + e * kHidden, row);
    logit_error = std::max(logit_error, logit.error);
    sum += probability[e] = std::exp(logit.value);
  }
  for (double& p : probability) {
    p /= sum;
  }
  std::vector<std::size_t> order(kExperts);
  for (std::size_t e = 0; e < kExperts; ++e) {
    order[e] = e;
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return probability[a] > probability[b]; });
  // Else rounding could choose another expert, and the bound would say nothing.
  const std::size_t used = setting.used;
  REQUIRE((used == kExperts ||
           probability[order[used - 1]] - probability[order[used]] > 4.0 * logit_error + 1e-6));
  double chosen = 0.0;
  for (std::size_t i = 0; i < used; ++i) {
    chosen += probability[order[i]];
  }
  std::vector<Bounded> out(kHidden);
  const auto add = [&](const std::vector<Bounded>& y, double weight, double relative) {
    for (std::size_t i = 0; i < kHidden; ++i) {
      out[i].value += weight * y[i].value;
      out[i].error += weight * y[i].error + (relative + 2 * kUnit) * std::abs(weight * y[i].value);
    }
  };
  for (std::size_t i = 0; i < used; ++i) {
    const std::size_t e = order[i], at = e * kFfn * kHidden;
    const double weight = probability[e] / (setting.normalised ? chosen : 1.0);
    // e^x moves by the error of x; the sums below it likewise.
    add(reference_mlp(t.gate.data() + at, t.up.data() + at, t.down.data() + at, kFfn, row), weight,
        3.0 * logit_error + 16 * kUnit);
  }
  if (setting.shared) {
    const Bounded gate = dot(t.shared_gate.data(), row);
    add(reference_mlp(t.gate.data() + kShared * kHidden, t.shared_up.data(), t.shared_down.data(),
                      kShared, row),
        1.0 / (1.0 + std::exp(-gate.value)), gate.error + 16 * kUnit);
  }
  return out;
}

TEST_CASE("float activations and weights: within the rounding of float32 of a double reference") {
  const Tensors tensors;
  for (const bool shared : {false, true}) {
    for (const bool normalised : {false, true}) {
      for (const std::size_t used : {std::size_t{1}, std::size_t{3}, kExperts}) {
        const Setting setting{.used = used, .shared = shared, .normalised = normalised};
        CAPTURE(used);
        Layer layer(setting, tensors);
        const std::vector<float> got = layer.run(rows_of(0, 20));
        double largest = 0.0, loosest = 0.0;
        for (std::size_t row = 0; row < 20; ++row) {
          const std::vector<Bounded> expected =
              reference_row(tensors, setting, inputs().data() + row * kHidden);
          for (std::size_t i = 0; i < kHidden; ++i) {
            const double difference =
                std::abs(static_cast<double>(got[row * kHidden + i]) - expected[i].value);
            REQUIRE(difference <= 1.01 * expected[i].error);  // 1.01: products of errors
            largest = std::max(largest, std::abs(expected[i].value));
            loosest = std::max(loosest, expected[i].error);
          }
        }
        CHECK(loosest < 1e-3 * largest);  // else the bound would allow anything
      }
    }
  }
}

/// The same from dense layers: one gated MLP per expert and row, added in ascending order.
std::vector<float> dense_reference(const Setting& setting, const Tensors& tensors,
                                   const std::vector<float>& x) {
  const MemorySource source = source_of(tensors, Layout::kOneByOne, setting.shared);
  const KernelTable& kernels = kernel_table(setting.isa);
  ThreadPool pool(1);
  const Compute compute{&kernels, &pool, setting.precision};
  WeightLoader loader(source, setting.weights);
  std::vector<GatedMlp> experts(kExperts + 1);
  PackedMatrix router, shared_gate;
  loader.matrix("blk.0.ffn_gate_inp.weight", kExperts, kHidden, router);
  const auto load = [&](const std::string& end, std::size_t ffn, GatedMlp& mlp) {
    loader.matrix("blk.0.ffn_gate" + end, ffn, kHidden, mlp.gate);
    loader.matrix("blk.0.ffn_up" + end, ffn, kHidden, mlp.up);
    loader.matrix("blk.0.ffn_down" + end, kHidden, ffn, mlp.down);
  };
  for (std::size_t e = 0; e < kExperts; ++e) {
    load(std::string(".").append(std::to_string(e)).append(".weight"), kFfn, experts[e]);
  }
  if (setting.shared) {
    loader.matrix("blk.0.ffn_gate_inp_shexp.weight", 1, kHidden, shared_gate);
    load("_shexp.weight", kShared, experts[kExperts]);
  }
  const PackedWeights weights = loader.load(pool);

  const bool quantised = experts[0].input(setting.precision).quantised;
  const InputForm form{.floats = true, .quantised = quantised, .half_sums = quantised};
  std::vector<float> scratch(matmul_scratch_floats());
  const auto apply = [&](const GatedMlp& mlp, const float* row, std::size_t ffn) {
    BufferPlan plan;
    const ActivationsPlan input_plan(plan, 1, kHidden, form);
    const ActivationsPlan inner_plan(
        plan, 1, ffn, {.floats = !quantised, .quantised = quantised, .half_sums = quantised});
    AlignedBuffer arena(plan.bytes());
    Activations input = input_plan.bind(arena), inner = inner_plan.bind(arena);
    input.set_rows(1);
    inner.set_rows(1);
    std::copy_n(row, kHidden, input.values);
    if (quantised) {
      kernels.quantise_row(row, quantised_row(input.quantised, 0, 0, kHidden));
    }
    std::vector<float> out(kHidden, 0.0F);
    mlp.run(compute, input, 1, inner, out.data(), scratch.data());
    return out;
  };
  std::vector<float> out(x.size(), 0.0F);
  for (std::size_t row = 0; row < x.size() / kHidden; ++row) {
    const float* const values = x.data() + row * kHidden;
    const auto add = [&](const std::vector<float>& y, float weight) {
      for (std::size_t i = 0; i < kHidden; ++i) {
        out[row * kHidden + i] += weight * y[i];
      }
    };
    std::vector<float> logits(kPanelRows), weight(setting.used), gate(kPanelRows);
    std::vector<std::uint32_t> chosen(setting.used);
    kernels.matmul_f32(router, values, kHidden, 1, 0, 1, logits.data(), kPanelRows);
    logits.resize(kExperts);
    choose_experts(logits, setting.normalised, chosen, weight);
    for (std::size_t i = 0; i < setting.used; ++i) {
      add(apply(experts[chosen[i]], values, kFfn), weight[i]);
    }
    if (setting.shared) {
      kernels.matmul_f32(shared_gate, values, kHidden, 1, 0, 1, gate.data(), kPanelRows);
      add(apply(experts[kExperts], values, kShared), 1.0F / (1.0F + std::exp(-gate[0])));
    }
  }
  return out;
}

std::vector<Setting> settings() {
  std::vector<Setting> found;
  for (const bool shared : {false, true}) {
    for (const std::optional<DType> weights :
         {std::optional<DType>{}, std::optional(DType::kQ8_0), std::optional(DType::kQ4_0)}) {
      for (const Precision precision : {Precision::kInt8, Precision::kExactF32}) {
        found.push_back(
            {.shared = shared, .normalised = !shared, .weights = weights, .precision = precision});
      }
    }
  }
  return found;
}

std::vector<Isa> isas() {
  std::vector<Isa> found{Isa::kScalar};
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= detect_isa()) {
      found.push_back(isa);
    }
  }
  return found;
}

TEST_CASE("the same bits as gated MLPs one by one, whatever the batch, threads and ISA") {
  const Tensors tensors;
  for (Setting setting : settings()) {
    const std::vector<float> expected = dense_reference(setting, tensors, inputs());
    for (const Isa isa : isas()) {
      for (const std::size_t threads : {1U, 3U}) {
        setting.isa = isa;
        setting.threads = threads;
        Layer layer(setting, tensors);
        CHECK(layer.run(inputs()) == expected);
        for (const std::size_t rows : {1U, 2U, 9U, 32U, 65U}) {
          CAPTURE(rows);
          std::vector<float> got;
          for (std::size_t begin = 0; begin < kRows; begin += rows) {
            const std::vector<float> part =
                layer.run(rows_of(begin, std::min<std::size_t>(rows, kRows - begin)));
            got.insert(got.end(), part.begin(), part.end());
          }
          REQUIRE(got == expected);
        }
      }
    }
  }
}

TEST_CASE("stacks, a stack of gate and up, and experts one by one are the same weights") {
  for (const std::optional<DType> weights : {std::optional<DType>{}, std::optional(DType::kQ4_0)}) {
    Setting setting{.weights = weights, .precision = Precision::kInt8};
    const std::vector<float> expected = Layer(setting).run(inputs());
    for (const Layout layout : {Layout::kGateUpStack, Layout::kOneByOne}) {
      setting.layout = layout;
      CHECK(Layer(setting).run(inputs()) == expected);
    }
  }
}

TEST_CASE("all rows at one expert, and none at most of them") {
  Tensors tensors;
  std::fill(tensors.router.begin(), tensors.router.end(), 0.0F);  // ties: expert 0
  const Setting setting{.used = 1, .shared = false, .precision = Precision::kInt8, .threads = 3};
  CHECK(Layer(setting, tensors).run(inputs()) == dense_reference(setting, tensors, inputs()));
}

TEST_CASE("a row of NaNs does not touch the others") {
  const Setting setting{.weights = DType::kQ8_0, .precision = Precision::kInt8, .threads = 2};
  Layer layer(setting);
  std::vector<float> x = rows_of(0, 20);
  const std::vector<float> clean = layer.run(x);
  std::fill_n(x.begin() + 7 * kHidden, kHidden, std::nanf(""));
  const std::vector<float> got = layer.run(x);
  for (std::size_t i = 0; i < clean.size(); ++i) {
    if (i / kHidden == 7) {
      CHECK(std::isnan(got[i]));
    } else {
      REQUIRE(got[i] == clean[i]);
    }
  }
}

TEST_CASE("a step allocates nothing") {
  const std::size_t before = test::allocation_count();
  {
    const std::vector<int> some(100);
  }
  REQUIRE(test::allocation_count() == before + 1);
  for (Setting setting : settings()) {
    setting.threads = 2;
    Layer layer(setting);
    (void)layer.run(inputs());
    CHECK(layer.allocations == 0);
    (void)layer.run(rows_of(0, 1));
    CHECK(layer.allocations == 0);
  }
}

}  // namespace
}  // namespace pocket
