#include "weight_loader.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/quant/dequantize.h"
#include "pocket/quant/quantize.h"

namespace pocket {
namespace {

// Alignment of every weight in the arena: a cache line, which pack_matrix asks for as well.
constexpr std::size_t kAlign = 64;
// Rows of a packing task. Two panels keep a task's output aligned to 64 bytes in every layout.
constexpr std::size_t kTaskRows = 256;
constexpr std::size_t kRowGrain = 2 * kPanelRows;

std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// Stored row of each output row of a run of whole heads.
std::vector<std::uint32_t> head_row_order(const RowOrder& order, std::size_t rows) {
  std::vector<std::uint32_t> stored(rows);
  const std::size_t pairs = order.rotary_dims / 2;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t head = row - row % order.head_dim;
    const std::size_t dim = row % order.head_dim;
    const std::size_t source = dim < pairs       ? 2 * dim
                               : dim < 2 * pairs ? 2 * (dim - pairs) + 1
                                                 : dim;
    stored[row] = static_cast<std::uint32_t>(head + source);
  }
  return stored;
}

// Stored rows of a float type in another format.
std::vector<std::byte> quantise(DType stored_type, std::span<const std::byte> stored,
                                std::size_t rows, std::size_t columns, DType type) {
  const std::size_t stored_row = row_bytes(stored_type, columns);
  const std::size_t out_row = row_bytes(type, columns);
  std::vector<std::byte> out(rows * out_row);
  std::vector<float> values(columns);
  for (std::size_t row = 0; row < rows; ++row) {
    dequantize_row(stored_type, stored.subspan(row * stored_row, stored_row), values);
    quantize_row(type, values, std::span(out).subspan(row * out_row, out_row));
  }
  return out;
}

// The wanted rows [row_begin, row_end) of a matrix, one after the other.
template <typename SourceRow>
std::vector<std::byte> gather(std::span<const std::byte> stored, std::size_t row_bytes,
                              std::size_t row_begin, std::size_t row_end,
                              const SourceRow& source_row) {
  std::vector<std::byte> out((row_end - row_begin) * row_bytes);
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const std::size_t source = source_row(row);
    std::copy_n(stored.begin() + static_cast<std::ptrdiff_t>(source * row_bytes), row_bytes,
                out.begin() + static_cast<std::ptrdiff_t>((row - row_begin) * row_bytes));
  }
  return out;
}

void transpose(std::span<float> values, std::size_t columns) {
  const std::vector<float> stored(values.begin(), values.end());
  const std::size_t rows = values.size() / columns;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) {
      values[column * rows + row] = stored[row * columns + column];
    }
  }
}

struct PackTask {
  std::size_t matrix;
  std::size_t row_begin;
  std::size_t row_end;
};

}  // namespace

StoredTensor WeightLoader::require(const std::string& name, const std::vector<std::size_t>& shape) {
  auto tensor = source_.find(name);
  if (!tensor) {
    throw Error(ErrorCode::kBadFile,
                source_.name() + ": tensor " + name + " is missing; expected " + shape_text(shape));
  }
  if (tensor->shape != shape) {
    throw Error(ErrorCode::kBadFile, source_.name() + ": tensor " + name + " has shape " +
                                         shape_text(tensor->shape) + "; expected " +
                                         shape_text(shape));
  }
  if (known_.insert(name).second) {
    parameters_ += tensor->elements();
  }
  return *std::move(tensor);
}

void WeightLoader::matrix(const std::string& name, std::size_t rows, std::size_t columns,
                          PackedMatrix& target, RowOrder order) {
  const std::size_t stored_rows =
      order.stored_rows > 0 ? rows / order.head_dim * order.stored_rows : rows;
  const auto found = source_.find(name);
  const bool flat = rows == 1 && found && found->shape.size() == 1;
  StoredTensor tensor = require(name, flat ? std::vector<std::size_t>{columns}
                                           : std::vector<std::size_t>{stored_rows, columns});
  add_matrix(std::move(tensor), rows, columns, target, order);
}

void WeightLoader::gathered(const std::string& name, std::size_t heads, std::size_t head_rows,
                            std::size_t columns, std::initializer_list<HeadPart> parts,
                            PackedMatrix& target) {
  // The shape first: what a file claims is not allocated for before its tensor confirms it.
  StoredTensor tensor = require(name, {heads * head_rows, columns});
  std::vector<std::uint32_t> stored;
  for (const HeadPart& part : parts) {
    for (std::size_t head = 0; head < heads; ++head) {
      for (std::size_t row = part.begin; row < part.begin + part.count; ++row) {
        stored.push_back(static_cast<std::uint32_t>(head * head_rows + row));
      }
    }
  }
  const std::size_t rows = stored.size();
  add_matrix(std::move(tensor), rows, columns, target, {}, std::move(stored));
}

void WeightLoader::stacked(const std::string& name, std::size_t stored_rows, std::size_t first_row,
                           std::size_t rows, std::size_t columns, std::span<PackedMatrix> targets) {
  const StoredTensor stack = require(name, {targets.size(), stored_rows, columns});
  const std::size_t stride = row_bytes(stack.type, columns);
  for (std::size_t index = 0; index < targets.size(); ++index) {
    StoredTensor part{.name = stack.name, .type = stack.type, .shape = {rows, columns}, .data = {}};
    part.data = stack.data.subspan((index * stored_rows + first_row) * stride, rows * stride);
    add_matrix(std::move(part), rows, columns, targets[index], {});
  }
}

void WeightLoader::add_matrix(StoredTensor tensor, std::size_t rows, std::size_t columns,
                              PackedMatrix& target, RowOrder order,
                              std::vector<std::uint32_t> stored) {
  const DType type = packed_type(tensor);
  const std::size_t bytes = aligned(packed_bytes(packed_layout(type), rows, columns));
  matrices_.push_back(
      {std::move(tensor), rows, columns, type, &target, order, std::move(stored), bytes_});
  bytes_ += bytes;
}

void WeightLoader::vector(const std::string& name, std::size_t size,
                          std::span<const float>& target) {
  add_vector({.tensor = require(name, {size}), .target = &target, .offset = bytes_});
}

void WeightLoader::norm(const std::string& name, std::size_t size, std::span<const float>& target) {
  add_vector({.tensor = require(name, {size}),
              .target = &target,
              .offset = bytes_,
              .added = source_.norm_weight_offset()});
}

void WeightLoader::mapped(const std::string& name, std::size_t size, float (*function)(float),
                          std::span<const float>& target) {
  add_vector(
      {.tensor = require(name, {size}), .target = &target, .offset = bytes_, .function = function});
}

void WeightLoader::transposed(const std::string& name, std::size_t rows, std::size_t columns,
                              std::span<const float>& target) {
  const auto found = source_.find(name);
  const bool flat = !found || found->shape.size() == 2;
  add_vector({.tensor = require(name, flat ? std::vector<std::size_t>{rows, columns}
                                           : std::vector<std::size_t>{rows, 1, columns}),
              .target = &target,
              .offset = bytes_,
              .transposed_columns = columns});
}

void WeightLoader::add_vector(Vector vector) {
  bytes_ += aligned(vector.tensor.elements() * sizeof(float));
  vectors_.push_back(std::move(vector));
}

DType WeightLoader::packed_type(const StoredTensor& tensor) const {
  const bool floats =
      tensor.type == DType::kF32 || tensor.type == DType::kF16 || tensor.type == DType::kBF16;
  const bool router = tensor.name.ends_with("ffn_gate_inp.weight") ||
                      tensor.name.ends_with("ffn_gate_inp_shexp.weight");
  if (!weights_ || !floats || router) {
    return tensor.type;
  }
  const bool precise = tensor.name == "token_embd.weight" || tensor.name == "output.weight" ||
                       tensor.name.ends_with("ssm_alpha.weight") ||
                       tensor.name.ends_with("ssm_beta.weight") ||
                       tensor.name.ends_with("ssm_ba.weight");
  DType type = precise ? DType::kQ8_0 : *weights_;
  if (tensor.shape.back() % dtype_info(type).block_size != 0) {
    type = narrow_blocks(type);
  }
  return tensor.shape.back() % dtype_info(type).block_size == 0 ? type : tensor.type;
}

void WeightLoader::refuse_unknown_tensors() const {
  for (const std::string& name : source_.tensor_names()) {
    if (!known_.contains(name)) {
      throw Error(ErrorCode::kUnsupported, source_.name() + ": tensor " + quoted(name) +
                                               " is not part of a " + source_.architecture() +
                                               " model that this build can compute");
    }
  }
}

PackedWeights WeightLoader::load(ThreadPool& pool) {
  refuse_unknown_tensors();
  PackedWeights weights{.arena = AlignedBuffer(bytes_), .parameter_count = parameters_};

  for (const Vector& item : vectors_) {
    const std::span<float> values = weights.arena.view<float>(item.offset, item.tensor.elements());
    dequantize_row(item.tensor.type, item.tensor.data, values);
    for (float& value : values) {
      value = item.function == nullptr ? value + item.added : item.function(value);
    }
    if (item.transposed_columns > 0) {
      transpose(values, item.transposed_columns);
    }
    *item.target = values;
  }

  std::vector<PackTask> tasks;
  for (std::size_t m = 0; m < matrices_.size(); ++m) {
    const Matrix& item = matrices_[m];
    const std::size_t rows = item.rows;
    const std::size_t grain =
        item.order.head_dim > 0 ? std::lcm(kRowGrain, item.order.head_dim) : kRowGrain;
    const std::size_t step = (kTaskRows + grain - 1) / grain * grain;
    for (std::size_t begin = 0; begin < rows; begin += step) {
      tasks.push_back({m, begin, std::min(rows, begin + step)});
    }
    *item.target = PackedMatrix{.data = weights.arena.data() + item.offset,
                                .rows = rows,
                                .columns = item.columns,
                                .layout = packed_layout(item.packed_type)};
  }

  pool.parallel_for(tasks.size(), [&](std::size_t index, std::size_t) {
    const PackTask& task = tasks[index];
    const Matrix& item = matrices_[task.matrix];
    const std::size_t rows = task.row_end - task.row_begin;
    const std::size_t columns = item.target->columns;
    const std::size_t stride = row_bytes(item.tensor.type, columns);
    const std::vector<std::uint32_t> order =
        item.order.head_dim > 0 ? head_row_order(item.order, rows) : std::vector<std::uint32_t>{};
    const std::size_t offset =
        item.offset + task.row_begin / kPanelRows * item.target->panel_bytes();
    std::vector<std::byte> gathered;
    if (!item.stored.empty()) {
      gathered = gather(item.tensor.data, stride, task.row_begin, task.row_end,
                        [&](std::size_t row) { return item.stored[row]; });
    } else if (item.order.stored_rows > 0) {
      const RowOrder& heads = item.order;
      gathered =
          gather(item.tensor.data, stride, task.row_begin, task.row_end, [&](std::size_t row) {
            return row / heads.head_dim * heads.stored_rows + heads.first_row +
                   row % heads.head_dim;
          });
    }
    std::span<const std::byte> stored =
        gathered.empty() ? item.tensor.data.subspan(task.row_begin * stride, rows * stride)
                         : std::span<const std::byte>(gathered);
    std::vector<std::byte> quantised;
    if (item.packed_type != item.tensor.type) {
      quantised = quantise(item.tensor.type, stored, rows, columns, item.packed_type);
      stored = quantised;
    }
    pack_matrix(
        item.packed_type, stored, rows, columns, order,
        weights.arena.view<std::byte>(offset, packed_bytes(item.target->layout, rows, columns)));
  });
  source_.release();
  return weights;
}

}  // namespace pocket
