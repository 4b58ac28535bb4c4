#include "pocket/runtime/engine.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/base/thread_pool.h"
#include "pocket/kv/kv_pool.h"
#include "pocket/kv/state_store.h"
#include "pocket/models/model.h"
#include "pocket/models/weight_source.h"
#include "pocket/quant/quantize.h"
#include "pocket/runtime/step_check.h"

namespace pocket {
namespace {

// Rows of logits computed at once. The head's weights are by far the largest matrix, so it pays to
// read them once for all sequences; more rows than this go in several passes, which bounds the
// buffer (64 x 128k floats are 32 MiB).
constexpr std::size_t kMaxLogitsRows = 64;
// Above these no machine of this kind computes anything useful, and products stay in range.
constexpr std::size_t kMaxSequences = 1 << 16;
constexpr std::size_t kMaxBatchTokens = 1 << 20;

void check_option(const char* name, std::size_t value, std::size_t max) {
  if (value == 0 || value > max) {
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": got " + std::to_string(value) +
                                                 "; must be from 1 to " + std::to_string(max));
  }
}

EngineOptions resolved(EngineOptions options) {
  check_option("num_blocks", options.num_blocks, std::size_t{1} << 30);
  check_option("max_sequences", options.max_sequences, kMaxSequences);
  check_option("max_batch_tokens", options.max_batch_tokens, kMaxBatchTokens);
  if (options.state_snapshots > kMaxSequences) {
    check_option("state_snapshots", options.state_snapshots, kMaxSequences);
  }
  if (options.weights && !can_quantize(*options.weights)) {
    throw Error(ErrorCode::kUnsupported, "weights: got " +
                                             std::string(dtype_info(*options.weights).name) +
                                             "; supported are Q8_0 and Q4_0");
  }
  if (!options.isa) {
    options.isa = select_isa();
  }
  return options;
}

class CpuEngine final : public Engine {
 public:
  CpuEngine(const std::filesystem::path& path, const EngineOptions& options)
      : options_(resolved(options)),
        kernels_(kernel_table(*options_.isa)),
        pool_(options_.threads),
        model_(load(path)),
        kv_(pool_shape()),
        states_(store_shape()),
        info_(model_->info()),
        checker_({.vocab = info_.vocab,
                  .num_blocks = options_.num_blocks,
                  .max_sequences = options_.max_sequences,
                  .max_batch_tokens = options_.max_batch_tokens,
                  .max_context = model_->max_context(),
                  .states = states_.empty() ? nullptr : &states_}) {
    options_.max_context = model_->max_context();
    options_.threads = pool_.size();
    info_.kv_bytes_per_block = kv_block_bytes(kv_.shape());
    samplers_.reserve(pool_.size());
    for (std::size_t i = 0; i < pool_.size(); ++i) {
      samplers_.emplace_back(kernels_, info_.vocab);
    }
  }

  void step(const StepInput& input, const StepOutput& output) override {
    const std::span<const SequenceRows> sequences = checker_.check(input, output);
    for (const SequenceRows& sequence :
         states_.empty() ? std::span<const SequenceRows>{} : sequences) {
      states_.begin(sequence.slot, sequence.first_position);
    }
    model_->forward(
        {.token_ids = input.token_ids, .sequences = sequences, .wanted = input.logits_rows}, kv_,
        states_);
    for (const SequenceRows& sequence :
         states_.empty() ? std::span<const SequenceRows>{} : sequences) {
      states_.end(sequence.slot, sequence.first_position + sequence.rows);
    }
    const std::size_t pass = logits_rows();
    for (std::size_t begin = 0; begin < input.logits_rows.size(); begin += pass) {
      const std::size_t rows = std::min(pass, input.logits_rows.size() - begin);
      float* logits = model_->logits(input.logits_rows.subspan(begin, rows));
      if (input.sampling.empty()) {
        copy_logits(logits, rows, output.logits.subspan(begin * info_.vocab));
      } else {
        sample(logits, input, begin, rows, output);
      }
    }
  }

  void copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to) override {
    kv_.copy_blocks(from, to);
  }

  void save_states(std::span<const std::int32_t> slots,
                   std::span<const std::int32_t> snapshots) override {
    states_.save(slots, snapshots);
  }
  void load_states(std::span<const std::int32_t> snapshots,
                   std::span<const std::int32_t> slots) override {
    states_.load(snapshots, slots);
  }

  const ModelInfo& model() const noexcept override { return info_; }
  const EngineOptions& options() const noexcept override { return options_; }
  std::size_t kv_cache_bytes() const noexcept override { return kv_.bytes(); }
  std::size_t state_store_bytes() const noexcept override { return states_.bytes(); }
  std::size_t workspace_bytes() const noexcept override { return model_->workspace_bytes(); }

 private:
  std::size_t logits_rows() const { return std::min({kMaxLogitsRows, options_.max_batch_tokens}); }

  std::unique_ptr<Model> load(const std::filesystem::path& path) {
    const std::unique_ptr<WeightSource> source = open_weight_source(path.string());
    return load_model(*source, {.kernels = &kernels_,
                                .pool = &pool_,
                                .precision = options_.precision,
                                .max_batch_tokens = options_.max_batch_tokens,
                                .max_sequences = options_.max_sequences,
                                .weights = options_.weights,
                                .max_context = options_.max_context,
                                .max_logits_rows = logits_rows()});
  }

  KvShape pool_shape() const {
    KvShape shape = model_->kv_shape();
    shape.num_blocks = options_.num_blocks;
    shape.dtype = options_.kv_dtype;
    return shape;
  }

  StateShape store_shape() const {
    StateShape shape = model_->state_shape();
    shape.slots = options_.max_sequences;
    shape.snapshots = options_.state_snapshots;
    return shape;
  }

  void copy_logits(const float* logits, std::size_t rows, std::span<float> out) const {
    for (std::size_t row = 0; row < rows; ++row) {
      std::memcpy(out.data() + row * info_.vocab, logits + row * model_->logits_stride(),
                  info_.vocab * sizeof(float));
    }
  }

  void sample(float* logits, const StepInput& input, std::size_t begin, std::size_t rows,
              const StepOutput& out) {
    const std::size_t vocab = input.sample_vocab == 0 ? info_.vocab : input.sample_vocab;
    const std::size_t stride = model_->logits_stride();
    pool_.parallel_for(rows, [&](std::size_t row, std::size_t thread) {
      const std::size_t r = begin + row;
      const std::span<TokenLogprob> top =
          out.top.empty() ? out.top : out.top.subspan(r * kMaxTopLogprobs, kMaxTopLogprobs);
      out.sampled[r] =
          samplers_[thread].sample_row({logits + row * stride, vocab}, input.sampling[r], top);
    });
  }

  EngineOptions options_;
  const KernelTable& kernels_;
  ThreadPool pool_;
  std::unique_ptr<Model> model_;
  KvPool kv_;
  StateStore states_;
  ModelInfo info_;
  StepChecker checker_;
  std::vector<Sampler> samplers_;  // one per thread
};

}  // namespace

ModelInfo inspect_model(const std::filesystem::path& model, KvDType kv_dtype) {
  ModelInfo info = describe_model(*open_weight_source(model.string()));
  info.kv_bytes_per_block = kv_block_bytes({.layers = info.attention_layers,
                                            .kv_heads = info.kv_heads,
                                            .head_dim = info.head_dim,
                                            .num_blocks = 1,
                                            .dtype = kv_dtype});
  return info;
}

std::unique_ptr<Engine> Engine::load(const std::filesystem::path& model,
                                     const EngineOptions& options) {
  return std::make_unique<CpuEngine>(model, options);
}

}  // namespace pocket
