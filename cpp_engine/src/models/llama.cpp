// Llama 1 to 3.x and its relatives (SmolLM2, TinyLlama, Mistral): pre-norm blocks of grouped-query
// attention and a gated MLP (Touvron et al. 2023, arXiv 2302.13971) or, in Mixtral, experts (arXiv
// 2401.04088). Models that differ by features
// of these blocks only (qwen.cpp, gemma.cpp), that have recurrent layers between them (qwen35.cpp)
// or experts in them (qwen_moe.cpp), are this one with another configuration.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "architectures.h"
#include "decoder_workspace.h"
#include "expert_config.h"
#include "layers/embedding.h"
#include "layers/expert_mlp.h"
#include "layers/gated_delta_net.h"
#include "layers/gated_mlp.h"
#include "layers/linear.h"
#include "layers/norm.h"
#include "layers/paged_attention.h"
#include "output_rows.h"
#include "pocket/base/error.h"
#include "weight_loader.h"

namespace pocket {
namespace {

struct Block {
  std::span<const float> attention_norm;
  PagedAttention attention;  // or, in recurrent layers:
  GatedDeltaNet delta;
  std::span<const float> attention_post_norm;  // empty without `post_norms`
  std::span<const float> mlp_norm;
  GatedMlp mlp;  // or, in sparse layers:
  ExpertMlp experts;
  std::span<const float> mlp_post_norm;
};

class Llama final : public Model {
 public:
  Llama(const WeightSource& source, const ModelOptions& options, DecoderConfig config)
      : compute_{options.kernels, options.pool, options.precision},
        config_(std::move(config)),
        max_context_(options.max_context == 0 ? config_.context : options.max_context),
        blocks_(config_.layers),
        schedule_(options.max_batch_tokens, options.max_sequences),
        output_schedule_(options.max_batch_tokens, options.max_sequences),
        output_rows_(options.max_batch_tokens, options.max_sequences),
        head_rows_(options.max_logits_rows),
        routing_(options.max_batch_tokens, config_.experts) {
    if (max_context_ > config_.context) {
      throw Error(ErrorCode::kInvalidArgument, "max_context: got " + std::to_string(max_context_) +
                                                   "; the model's limit is " +
                                                   std::to_string(config_.context));
    }
    load_weights(source, options);
    rope_ = RopeTable(config_.rope, max_context_);
    if (config_.sliding_rope) {
      sliding_rope_ = RopeTable(*config_.sliding_rope, max_context_);
    }
    workspace_.emplace(config_, options, forms(), logits_stride());
  }

  const ModelInfo& info() const noexcept override { return info_; }
  std::size_t max_context() const noexcept override { return max_context_; }
  std::size_t logits_stride() const noexcept override { return head_->panels() * kPanelRows; }
  KvShape kv_shape() const noexcept override {
    return {.layers = config_.attention_count(),
            .kv_heads = config_.kv_heads,
            .head_dim = config_.head_dim};
  }
  StateShape state_shape() const override { return config_.state_shape(); }
  std::size_t workspace_bytes() const noexcept override {
    return workspace_->bytes() + rope_.bytes() + sliding_rope_.bytes();
  }

  void forward(const ForwardBatch& batch, KvPool& kv, StateStore& states) override {
    DecoderWorkspace& w = *workspace_;
    std::size_t rows = batch.token_ids.size();
    w.set_rows(rows);
    schedule_.plan(batch.sequences);
    output_rows_.plan(batch);
    embed(compute_, embedding_, batch.token_ids, config_.embedding_scale, w.residual);
    std::size_t recurrent = 0;  // such layers so far
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
      const Block& block = blocks_[layer];
      const bool narrows = layer + 1 == blocks_.size() && !output_rows_.all();
      normalise_input(block.attention_norm, rows);
      if (config_.recurrent(layer)) {
        block.delta.run(compute_, config_, batch.sequences, recurrent++, w.input, rows, states,
                        w.delta, begin_branch(rows), w.matmul_scratch);
        end_branch(rows, block.attention_post_norm);
        rows = narrows ? keep_output_rows() : rows;
      } else {
        const AttentionSchedule* schedule = &schedule_;
        if (narrows) {
          block.attention.store(compute_, config_, rope_of(layer), schedule_, layer - recurrent,
                                w.input, rows, kv, w.attention);
          rows = keep_output_rows();
          if (rows == 0) {
            return;
          }
          normalise_input(block.attention_norm, rows);
          output_schedule_.plan(output_rows_.sequences());
          schedule = &output_schedule_;
        }
        const auto attend = narrows ? &PagedAttention::attend : &PagedAttention::run;
        (block.attention.*attend)(compute_, config_, rope_of(layer), *schedule, layer - recurrent,
                                  config_.window_of(layer), w.input, rows, kv, w.attention,
                                  begin_branch(rows), w.matmul_scratch);
        end_branch(rows, block.attention_post_norm);
      }
      if (rows == 0) {
        return;
      }
      normalise_input(block.mlp_norm, rows);
      if (config_.sparse(layer)) {
        block.experts.run(compute_, w.input, rows, routing_, w.experts, begin_branch(rows),
                          w.matmul_scratch);
      } else {
        block.mlp.run(compute_, w.input, rows, w.mlp_inner, begin_branch(rows), w.matmul_scratch);
      }
      end_branch(rows, block.mlp_post_norm);
    }
  }

  float* logits(std::span<const std::int32_t> rows) override {
    DecoderWorkspace& w = *workspace_;
    const std::span<std::int32_t> kept = std::span(head_rows_).first(rows.size());
    std::transform(rows.begin(), rows.end(), kept.begin(),
                   [this](std::int32_t row) { return output_rows_.number_of(row); });
    w.head_input.set_rows(rows.size());
    normalise(compute_, w.residual, rows.size(), kept, output_norm_, config_.norm_epsilon,
              w.head_input);
    const Projection head{head_, w.logits, logits_stride()};
    project(compute_, w.head_input, rows.size(), std::span(&head, 1));
    return w.logits;
  }

 private:
  const RopeTable& rope_of(std::size_t layer) const {
    return config_.sliding_rope && config_.slides(layer) ? sliding_rope_ : rope_;
  }

  void normalise_input(std::span<const float> weight, std::size_t rows) {
    normalise(compute_, workspace_->residual, rows, {}, weight, config_.norm_epsilon,
              workspace_->input);
  }

  // From here on the step has its output rows only; returns how many they are.
  std::size_t keep_output_rows() {
    DecoderWorkspace& w = *workspace_;
    const std::span<const std::int32_t> kept = output_rows_.rows();
    for (std::size_t row = 0; row < kept.size(); ++row) {  // ascending, so none is overwritten
      const auto source = static_cast<std::size_t>(kept[row]);
      if (source != row) {
        std::copy_n(w.residual + source * config_.hidden, config_.hidden,
                    w.residual + row * config_.hidden);
      }
    }
    w.set_rows(kept.size());
    return kept.size();
  }

  // What attention or MLP add their output to: the residual or, where the output is normalised
  // first, zeros.
  float* begin_branch(std::size_t rows) {
    if (!config_.post_norms) {
      return workspace_->residual;
    }
    std::fill_n(workspace_->branch, rows * config_.hidden, 0.0F);
    return workspace_->branch;
  }

  void end_branch(std::size_t rows, std::span<const float> post_norm) {
    if (config_.post_norms) {
      add_normalised(compute_, workspace_->branch, rows, post_norm, config_.norm_epsilon,
                     workspace_->residual);
    }
  }

  void load_weights(const WeightSource& source, const ModelOptions& options) {
    WeightLoader loader(source, options.weights);
    loader.matrix("token_embd.weight", config_.vocab, config_.hidden, embedding_);
    loader.norm("output_norm.weight", config_.hidden, output_norm_);
    if (loader.has("output.weight")) {
      loader.matrix("output.weight", config_.vocab, config_.hidden, untied_head_);
      head_ = &untied_head_;
    }
    loader.known("rope_freqs.weight");  // read with the configuration
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      Block& block = blocks_[layer];
      loader.norm(prefix + "attn_norm.weight", config_.hidden, block.attention_norm);
      if (config_.recurrent(layer)) {
        block.delta.load(loader, prefix, config_);
      } else {
        block.attention.load(loader, prefix, config_, source.rope_pairs_interleaved());
      }
      // Models with recurrent layers call this norm by the place that it has in others.
      const bool hybrid = !config_.recurrent_layers.empty();
      loader.norm(prefix + (hybrid ? "post_attention_norm.weight" : "ffn_norm.weight"),
                  config_.hidden, block.mlp_norm);
      if (config_.sparse(layer)) {
        block.experts.load(loader, prefix, config_);
      } else {
        block.mlp.load(loader, prefix, config_);
      }
      if (config_.post_norms) {
        loader.norm(prefix + "post_attention_norm.weight", config_.hidden,
                    block.attention_post_norm);
        loader.norm(prefix + "post_ffw_norm.weight", config_.hidden, block.mlp_post_norm);
      }
    }
    for (std::size_t extra = 0; extra < config_.extra_layers; ++extra) {
      const std::string prefix = "blk." + std::to_string(blocks_.size() + extra) + ".";
      for (const std::string& name : source.tensor_names()) {
        if (name.starts_with(prefix)) {
          loader.known(name);
        }
      }
    }
    weights_ = loader.load(*compute_.pool);
    info_ = describe_decoder(source, config_);
    info_.weight_bytes = weights_.arena.size();
  }

  DecoderWorkspace::Forms forms() const {
    DecoderWorkspace::Forms forms{.head_input = input_form(*head_, compute_.precision)};
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
      const Block& block = blocks_[layer];
      if (config_.recurrent(layer)) {
        forms.block_input = forms.block_input | block.delta.input(compute_.precision);
        forms.delta_inner = forms.delta_inner | block.delta.inner(compute_.precision);
      } else {
        forms.block_input = forms.block_input | block.attention.input(compute_.precision);
        forms.attention_inner = forms.attention_inner | block.attention.inner(compute_.precision);
      }
      if (config_.sparse(layer)) {
        const ExpertMlp& experts = block.experts;
        forms.block_input = forms.block_input | experts.input(compute_.precision);
        forms.expert_input = forms.expert_input | experts.gathered(compute_.precision);
        forms.expert_inner = forms.expert_inner | experts.inner(compute_.precision);
        forms.shared_inner = forms.shared_inner | experts.shared_inner(compute_.precision);
      } else {
        forms.block_input = forms.block_input | block.mlp.input(compute_.precision);
        forms.mlp_inner = forms.mlp_inner | block.mlp.inner(compute_.precision);
      }
    }
    return forms;
  }

  Compute compute_;
  DecoderConfig config_;
  std::size_t max_context_;
  ModelInfo info_;
  PackedWeights weights_;
  PackedMatrix embedding_;
  PackedMatrix untied_head_;
  const PackedMatrix* head_ = &embedding_;  // tied unless the file has output.weight
  std::span<const float> output_norm_;
  std::vector<Block> blocks_;
  RopeTable rope_;
  RopeTable sliding_rope_;  // empty without `DecoderConfig::sliding_rope`
  AttentionSchedule schedule_;
  AttentionSchedule output_schedule_;  // of the last layer, where fewer rows leave it
  OutputRows output_rows_;
  std::vector<std::int32_t> head_rows_;  // by their numbers; as many as one call may ask for
  ExpertRouting routing_;
  std::optional<DecoderWorkspace> workspace_;
};

}  // namespace

std::unique_ptr<Model> make_decoder(const WeightSource& source, const ModelOptions& options,
                                    DecoderConfig config) {
  return std::make_unique<Llama>(source, options, std::move(config));
}

namespace {

DecoderConfig llama_config(const WeightSource& source) {
  const bool experts = source.get_uint("expert_count").value_or(0) > 0;
  DecoderConfig config = read_decoder_config(source, experts);
  if (experts) {  // whose files give their length as that of a dense MLP
    config.experts = read_expert_config(source, config,
                                        {.normalised = true, .shared = false, .ffn = config.ffn});
  }
  return config;
}

}  // namespace

std::unique_ptr<Model> make_llama(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, llama_config(source));
}

ModelInfo describe_llama(const WeightSource& source) {
  return describe_decoder(source, llama_config(source));
}

}  // namespace pocket
