#include "gated_delta_net.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "linear.h"
#include "row_tasks.h"

namespace pocket {
namespace {

constexpr float kNormEpsilon = 1e-6F;  // of q and k; not the model's

// One layer for one step: what its tasks share.
struct LayerStep {
  const GatedDeltaNet& weights;
  const Compute& compute;
  const DecoderConfig& config;
  const DeltaNetBuffers& buffers;
  StateStore& states;
  std::size_t layer;

  // Convolves `channels` channels from `begin` on, in place, and moves the slot's window past the
  // rows. Rows are taken last to first: a row's own inputs are then the last that need it.
  void convolve(const SequenceRows& sequence, std::size_t begin, std::size_t channels,
                float* window) const {
    const std::size_t width = config.delta.mixed_width();
    const std::size_t past = config.delta.taps - 1;
    float* const kept = states.conv(layer, sequence.slot) + begin;
    float* const x = buffers.mixed + sequence.first_row * width + begin;
    for (std::size_t j = 0; j < past; ++j) {
      std::copy_n(kept + j * width, channels, window + j * channels);
    }
    // Input `index` counts the window's rows, then the step's.
    const auto input = [&](std::size_t index) -> const float* {
      return index < past ? window + index * channels : x + (index - past) * width;
    };
    for (std::size_t j = 0; j < past; ++j) {
      std::copy_n(input(sequence.rows + j), channels, kept + j * width);
    }
    std::array<const float*, kMaxConvTaps> taps{};
    for (std::size_t row = sequence.rows; row-- > 0;) {
      for (std::size_t j = 0; j <= past; ++j) {
        taps[j] = input(row + j);
      }
      compute.kernels->causal_conv_silu(taps.data(), past + 1, weights.conv.data() + begin, width,
                                        channels, x + row * width);
    }
  }

  // Normalises each row's `key_dim` values from channel `begin` on.
  void normalise_keys(const SequenceRows& sequence, std::size_t begin, float scale) const {
    const std::size_t width = config.delta.mixed_width();
    for (std::size_t row = 0; row < sequence.rows; ++row) {
      compute.kernels->l2_normalise(buffers.mixed + (sequence.first_row + row) * width + begin,
                                    config.delta.key_dim, kNormEpsilon, scale);
    }
  }

  // All rows of one sequence for one key head and the value heads that share it.
  void run(const SequenceRows& sequence, std::size_t key_head, std::size_t thread) const {
    const DeltaNetConfig& delta = config.delta;
    float* const window = buffers.window + thread * buffers.window_floats;
    const std::size_t q = key_head * delta.key_dim;
    const std::size_t k = delta.key_width() + q;
    convolve(sequence, q, delta.key_dim, window);
    convolve(sequence, k, delta.key_dim, window);
    normalise_keys(sequence, q, 1.0F / std::sqrt(static_cast<float>(delta.key_dim)));
    normalise_keys(sequence, k, 1.0F);
    for (std::size_t index = 0; index < delta.group(); ++index) {
      const std::size_t head = delta.value_head(key_head, index);
      const std::size_t v = 2 * delta.key_width() + head * delta.value_dim;
      convolve(sequence, v, delta.value_dim, window);
      const float* const x = buffers.mixed + sequence.first_row * delta.mixed_width();
      const std::size_t gates = sequence.first_row * buffers.gate_stride + head;
      compute.kernels->delta_rule(
          {.q = x + q,
           .k = x + k,
           .v = x + v,
           .out = buffers.out + sequence.first_row * delta.value_width() + head * delta.value_dim,
           .qk_stride = delta.mixed_width(),
           .v_stride = delta.mixed_width(),
           .out_stride = delta.value_width(),
           .decay = buffers.decay + gates,
           .strength = buffers.strength + gates,
           .gate_stride = buffers.gate_stride,
           .tokens = sequence.rows,
           .key_dim = delta.key_dim,
           .value_dim = delta.value_dim,
           .state = states.memory(layer, sequence.slot) + head * delta.key_dim * delta.value_dim});
      finish(sequence, head);
    }
  }

  // Norm and gate of one head's output.
  void finish(const SequenceRows& sequence, std::size_t head) const {
    const std::size_t n = config.delta.value_dim;
    for (std::size_t row = sequence.first_row; row < sequence.first_row + sequence.rows; ++row) {
      const std::size_t at = row * config.delta.value_width() + head * n;
      float* const out = buffers.out + at;
      compute.kernels->rms_norm(out, weights.norm.data(), n, config.norm_epsilon, out);
      compute.kernels->silu_mul(buffers.gate + at, out, n, out);
      if (buffers.output.quantised.q != nullptr && n % kQuantBlock == 0) {
        compute.kernels->quantise_row(out,
                                      quantised_row(buffers.output.quantised, row, head * n, n));
      }
    }
  }
};

float negative_exp(float value) {
  return static_cast<float>(-std::exp(static_cast<double>(value)));
}

}  // namespace

void GatedDeltaNet::load(WeightLoader& loader, const std::string& prefix,
                         const DecoderConfig& config) {
  const DeltaNetConfig& delta = config.delta;
  const std::size_t key = delta.key_dim, values = delta.group() * delta.value_dim;
  if (const std::string fused = prefix + "ssm_in.weight"; loader.has(fused)) {
    const std::size_t rows = 2 * key + 2 * values;
    loader.gathered(fused, delta.key_heads, rows, config.hidden,
                    {{0, key}, {key, key}, {2 * key, values}}, mixed);
    loader.gathered(fused, delta.key_heads, rows, config.hidden, {{2 * key + values, values}},
                    gate);
  } else {
    loader.matrix(prefix + "attn_qkv.weight", delta.mixed_width(), config.hidden, mixed);
    loader.matrix(prefix + "attn_gate.weight", delta.value_width(), config.hidden, gate);
  }
  if (const std::string fused = prefix + "ssm_ba.weight"; loader.has(fused)) {
    const std::size_t group = delta.group();
    loader.gathered(fused, delta.key_heads, 2 * group, config.hidden, {{0, group}}, beta);
    loader.gathered(fused, delta.key_heads, 2 * group, config.hidden, {{group, group}}, alpha);
  } else {
    loader.matrix(prefix + "ssm_alpha.weight", delta.value_heads, config.hidden, alpha);
    loader.matrix(prefix + "ssm_beta.weight", delta.value_heads, config.hidden, beta);
  }
  loader.matrix(prefix + "ssm_out.weight", config.hidden, delta.value_width(), output);
  loader.transposed(prefix + "ssm_conv1d.weight", delta.mixed_width(), delta.taps, conv);
  if (loader.has(prefix + "ssm_a_log")) {
    loader.mapped(prefix + "ssm_a_log", delta.value_heads, negative_exp, rate);
  } else {
    loader.vector(prefix + "ssm_a", delta.value_heads, rate);
  }
  loader.vector(prefix + "ssm_dt.bias", delta.value_heads, bias);
  loader.vector(prefix + "ssm_norm.weight", delta.value_dim, norm);
}

InputForm GatedDeltaNet::input(Precision precision) const {
  return input_form(mixed, precision) | input_form(gate, precision) | input_form(alpha, precision) |
         input_form(beta, precision);
}

void GatedDeltaNet::run(const Compute& compute, const DecoderConfig& config,
                        std::span<const SequenceRows> sequences, std::size_t layer,
                        const Activations& x, std::size_t rows, StateStore& states,
                        const DeltaNetBuffers& buffers, float* residual,
                        float* matmul_scratch) const {
  const DeltaNetConfig& delta = config.delta;
  project(compute, x, rows,
          std::array{Projection{&mixed, buffers.mixed, delta.mixed_width()},
                     Projection{&gate, buffers.gate, delta.value_width()},
                     Projection{&alpha, buffers.decay, buffers.gate_stride},
                     Projection{&beta, buffers.strength, buffers.gate_stride}});
  for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
    float* const decay = buffers.decay + row * buffers.gate_stride;
    float* const strength = buffers.strength + row * buffers.gate_stride;
    compute.kernels->delta_gates(decay, strength, rate.data(), bias.data(), delta.value_heads,
                                 decay, strength);
  });
  const LayerStep step{*this, compute, config, buffers, states, layer};
  compute.pool->parallel_for(
      sequences.size() * delta.key_heads, [&](std::size_t task, std::size_t thread) {
        step.run(sequences[task / delta.key_heads], task % delta.key_heads, thread);
      });
  if (buffers.output.quantised.q != nullptr && delta.value_dim % kQuantBlock != 0) {
    for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
      compute.kernels->quantise_row(
          buffers.out + row * delta.value_width(),
          quantised_row(buffers.output.quantised, row, 0, delta.value_width()));
    });
  }
  project_add(compute, buffers.output, rows, output, residual, matmul_scratch);
}

}  // namespace pocket
