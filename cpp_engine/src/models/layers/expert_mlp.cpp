#include "expert_mlp.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "gated_mlp.h"
#include "linear.h"
#include "row_tasks.h"

namespace pocket {
namespace {

// Rows [first, first + rows) of an array that holds several sets of rows one after the other.
Activations part(const Activations& all, std::size_t first, std::size_t rows) {
  Activations found{.columns = all.columns};
  if (all.values != nullptr) {
    found.values = all.values + first * all.columns;
  }
  if (all.quantised.q != nullptr) {
    found.quantised = quantised_range(all.quantised, first, rows);
  }
  return found;
}

InputForm union_form(std::span<const PackedMatrix> matrices, Precision precision) {
  InputForm form;
  for (const PackedMatrix& matrix : matrices) {
    form = form | input_form(matrix, precision);
  }
  return form;
}

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

void add_scaled(float* to, const float* from, float weight, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] += weight * from[i];
  }
}

}  // namespace

void ExpertMlp::load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config) {
  const ExpertConfig& experts = config.experts;
  activation_ = config.activation;
  loader.matrix(prefix + "ffn_gate_inp.weight", experts.count, config.hidden, router_);
  load_experts(loader, prefix, config);
  shared_ = experts.shared_ffn > 0;
  if (shared_) {
    loader.matrix(prefix + "ffn_gate_inp_shexp.weight", 1, config.hidden, shared_gate_);
    loader.matrix(prefix + "ffn_gate_shexp.weight", experts.shared_ffn, config.hidden,
                  shared_expert_.gate);
    loader.matrix(prefix + "ffn_up_shexp.weight", experts.shared_ffn, config.hidden,
                  shared_expert_.up);
    loader.matrix(prefix + "ffn_down_shexp.weight", config.hidden, experts.shared_ffn,
                  shared_expert_.down);
  }
}

void ExpertMlp::load_experts(WeightLoader& loader, const std::string& prefix,
                             const DecoderConfig& config) {
  const std::size_t count = config.experts.count, ffn = config.experts.ffn;
  gate_.resize(count);
  up_.resize(count);
  down_.resize(count);
  const auto load = [&](const char* part, std::size_t rows, std::size_t columns,
                        std::vector<PackedMatrix>& targets) {
    const std::string name = prefix + part;
    if (loader.has(name + ".0.weight")) {
      for (std::size_t expert = 0; expert < count; ++expert) {
        loader.matrix(name + "." + std::to_string(expert) + ".weight", rows, columns,
                      targets[expert]);
      }
    } else {
      loader.stacked(name + "_exps.weight", rows, 0, rows, columns, targets);
    }
  };
  if (const std::string both = prefix + "ffn_gate_up_exps.weight"; loader.has(both)) {
    loader.stacked(both, 2 * ffn, 0, ffn, config.hidden, gate_);
    loader.stacked(both, 2 * ffn, ffn, ffn, config.hidden, up_);
  } else {
    load("ffn_gate", ffn, config.hidden, gate_);
    load("ffn_up", ffn, config.hidden, up_);
  }
  load("ffn_down", config.hidden, ffn, down_);
}

InputForm ExpertMlp::input(Precision precision) const {
  InputForm form{.floats = true};
  if (shared_) {
    form = form | input_form(shared_expert_.gate, precision) |
           input_form(shared_expert_.up, precision);
  }
  return form;
}

InputForm ExpertMlp::gathered(Precision precision) const {
  return union_form(gate_, precision) | union_form(up_, precision);
}

InputForm ExpertMlp::inner(Precision precision) const {
  return union_form(down_, precision);
}

InputForm ExpertMlp::shared_inner(Precision precision) const {
  return shared_ ? input_form(shared_expert_.down, precision) : InputForm{};
}

void ExpertMlp::run(const Compute& compute, const Activations& x, std::size_t rows,
                    ExpertRouting& routing, const ExpertBuffers& buffers, float* residual,
                    float* scratch) const {
  route(compute, x, rows, routing, buffers);
  gather(compute, x, routing, buffers);
  multiply_up(compute, x, rows, routing, buffers, scratch);
  multiply_down(compute, rows, routing, buffers, residual, scratch);
}

void ExpertMlp::route(const Compute& compute, const Activations& x, std::size_t rows,
                      ExpertRouting& routing, const ExpertBuffers& buffers) const {
  const Compute exact{compute.kernels, compute.pool, Precision::kExactF32};
  const std::array<Projection, 2> projections{
      Projection{&router_, buffers.scores, buffers.score_stride},
      Projection{&shared_gate_, buffers.shared_gate, kPanelRows}};
  project(exact, x, rows, std::span(projections).first(shared_ ? 2 : 1));
  routing.plan(compute, buffers.scores, buffers.score_stride, rows);
}

void ExpertMlp::gather(const Compute& compute, const Activations& x, const ExpertRouting& routing,
                       const ExpertBuffers& buffers) const {
  for_each_row(compute, routing.pairs(), [&](std::size_t pair, std::size_t) {
    const float* const from = x.values + routing.row_of(pair) * x.columns;
    const ExpertRouting::Group& group = routing.group_of(pair);
    const Activations to = part(buffers.gathered, group.first, group.rows);
    const std::size_t row = pair - group.first;
    if (to.values != nullptr) {
      std::copy_n(from, x.columns, to.values + row * x.columns);
    }
    if (to.quantised.q != nullptr) {
      compute.kernels->quantise_row(from, quantised_row(to.quantised, row, 0, x.columns));
    }
  });
}

void ExpertMlp::multiply_up(const Compute& compute, const Activations& x, std::size_t rows,
                            ExpertRouting& routing, const ExpertBuffers& buffers,
                            float* scratch) const {
  // Few experts have to keep all threads busy; many do so without being cut into small pieces.
  const std::span<const ExpertRouting::Group> groups = routing.groups();
  const std::size_t threads = compute.pool->size();
  const std::size_t share = groups.size() >= TileGrid::kTasksPerThread * threads
                                ? 1
                                : std::max<std::size_t>(2, threads / groups.size());
  const auto tiles_of = [&](const ExpertRouting::Group& group) {
    return gated_tiles(group.rows, gate_[group.expert].rows, threads == 1 ? 1 : share);
  };
  const std::span<std::size_t> ends = routing.task_ends();
  std::size_t tasks = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    ends[i] = tasks += tiles_of(groups[i]).tasks();
  }
  const std::size_t expert_tasks = tasks;
  const TileGrid shared_tiles = gated_tiles(rows, shared_expert_.gate.rows, threads);
  tasks += shared_ ? shared_tiles.tasks() : 0;

  compute.pool->parallel_for(tasks, [&](std::size_t task, std::size_t thread) {
    float* const own = scratch + thread * matmul_scratch_floats();
    if (task >= expert_tasks) {
      multiply_gated(compute, {shared_expert_.gate, shared_expert_.up, activation_}, x,
                     shared_tiles.tile(task - expert_tasks), buffers.shared_inner, own);
      return;
    }
    const auto found =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const ExpertRouting::Group& group = groups[found];
    multiply_gated(compute, {gate_[group.expert], up_[group.expert], activation_},
                   part(buffers.gathered, group.first, group.rows),
                   tiles_of(group).tile(task - (found == 0 ? 0 : ends[found - 1])),
                   part(buffers.inner, group.first, group.rows), own);
  });
}

void ExpertMlp::multiply_down(const Compute& compute, std::size_t rows,
                              const ExpertRouting& routing, const ExpertBuffers& buffers,
                              float* residual, float* scratch) const {
  constexpr std::size_t kGranulePanels = 3;  // kernels for many rows take 3 at once
  const std::size_t hidden = down_.front().rows;
  std::size_t most = shared_ ? rows : 1;
  for (const ExpertRouting::Group& group : routing.groups()) {
    most = std::max(most, group.rows);
  }
  most = std::min(most, TileGrid::kTileRows);
  const TileGrid columns(most, down_.front().panels(), kPanelRows, compute.pool->size(),
                         kGranulePanels);
  compute.pool->parallel_for(columns.tasks(), [&](std::size_t task, std::size_t thread) {
    const Tile tile = columns.tile(task);
    const std::size_t width = tile.units() * kPanelRows;
    float* const y = scratch + thread * matmul_scratch_floats();
    const auto add = [&](const PackedMatrix& down, const Activations& input, std::size_t count,
                         const auto& row_of, const auto& weight_of) {
      for (std::size_t begin = 0; begin < count; begin += TileGrid::kTileRows) {
        const std::size_t height = std::min(TileGrid::kTileRows, count - begin);
        multiply(compute, panel_slice(down, tile.unit_begin, tile.unit_end), input, begin, height,
                 y, width);
        for (std::size_t r = 0; r < height; ++r) {
          add_scaled(residual + row_of(begin + r) * hidden + tile.unit_begin * kPanelRows,
                     y + r * width, weight_of(begin + r), width);
        }
      }
    };
    for (const ExpertRouting::Group& group : routing.groups()) {
      add(
          down_[group.expert], part(buffers.inner, group.first, group.rows), group.rows,
          [&](std::size_t r) { return routing.row_of(group.first + r); },
          [&](std::size_t r) { return routing.weight_of(group.first + r); });
    }
    if (shared_) {
      add(
          shared_expert_.down, buffers.shared_inner, rows, [](std::size_t r) { return r; },
          [&](std::size_t r) { return sigmoid(buffers.shared_gate[r * kPanelRows]); });
    }
  });
}

}  // namespace pocket
