#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "pocket/base/aligned_buffer.h"
#include "pocket/base/thread_pool.h"
#include "pocket/cpu/packed_matrix.h"
#include "pocket/models/weight_source.h"

namespace pocket {

/// Order of a matrix's rows in the file relative to the order that the model computes in.
struct RowOrder {
  /// 0: as stored. Otherwise rows come in heads of `head_dim`, whose first `rotary_dims` rows are
  /// stored pair by pair (interleaved RoPE) and are wanted as two halves (rotate-half RoPE).
  std::size_t head_dim = 0;
  std::size_t rotary_dims = 0;
  /// Not 0: the file's heads have as many rows, of which the matrix takes `head_dim` from
  /// `first_row` on. So one tensor makes several matrices (queries and their gates).
  std::size_t stored_rows = 0;
  std::size_t first_row = 0;
};

/// Rows [begin, begin + count) of each of a tensor's heads.
struct HeadPart {
  std::size_t begin;
  std::size_t count;
};

/// All weights of a model in their packed form; matrices and vectors point into `arena`.
struct PackedWeights {
  AlignedBuffer arena;
  std::size_t parameter_count = 0;
};

/// Collects what a model wants, checks it against the source, and packs everything once, in
/// parallel, into one arena.
///
/// Usage: call `matrix` and `vector` for every weight (the targets must stay where they are), then
/// `load`, which fills the targets. Errors: `Error(kBadFile)` for a missing or ill-shaped tensor,
/// with its name and both shapes; `Error(kUnsupported)` from `load` if the source has a tensor that
/// nobody asked for: a model that ignored a bias would be silently wrong.
class WeightLoader {
 public:
  /// `weights`: format that float matrices whose rows are whole blocks are quantised to. The
  /// embedding and the head get at least Q8_0: every token passes through them. So do the small
  /// matrices of recurrent layers' gates, whose results are exponents. Routers of experts stay as
  /// they are: a small error of theirs is another expert.
  explicit WeightLoader(const WeightSource& source, std::optional<DType> weights = {})
      : source_(source), weights_(weights) {}

  [[nodiscard]] bool has(std::string_view name) const { return source_.find(name).has_value(); }
  /// A matrix of one row may be stored as a vector.
  void matrix(const std::string& name, std::size_t rows, std::size_t columns, PackedMatrix& target,
              RowOrder order = {});
  /// One part after the other of all heads of a tensor [heads * head_rows, columns].
  void gathered(const std::string& name, std::size_t heads, std::size_t head_rows,
                std::size_t columns, std::initializer_list<HeadPart> parts, PackedMatrix& target);
  /// One tensor [count, stored_rows, columns] of `targets.size()` matrices: each takes `rows` rows
  /// of its own part, from `first_row` on.
  void stacked(const std::string& name, std::size_t stored_rows, std::size_t first_row,
               std::size_t rows, std::size_t columns, std::span<PackedMatrix> targets);
  void vector(const std::string& name, std::size_t size, std::span<const float>& target);
  /// As `vector`, through `function`.
  void mapped(const std::string& name, std::size_t size, float (*function)(float),
              std::span<const float>& target);
  /// A small matrix [rows, columns], or [rows, 1, columns], as floats [columns, rows].
  void transposed(const std::string& name, std::size_t rows, std::size_t columns,
                  std::span<const float>& target);
  /// As `vector`, plus `norm_weight_offset()` of the source.
  void norm(const std::string& name, std::size_t size, std::span<const float>& target);
  /// Marks a tensor that is read elsewhere as known.
  void known(const std::string& name) { known_.insert(name); }

  [[nodiscard]] PackedWeights load(ThreadPool& pool);

 private:
  struct Matrix {
    StoredTensor tensor;
    std::size_t rows;  // of the matrix; the tensor may have more
    std::size_t columns;
    DType packed_type;  ///< the tensor's, or what it is quantised to
    PackedMatrix* target;
    RowOrder order;
    std::vector<std::uint32_t> stored;  // row of the tensor of each row; empty: `order` says
    std::size_t offset;
  };
  struct Vector {
    StoredTensor tensor;
    std::span<const float>* target;
    std::size_t offset;
    float added = 0.0F;
    float (*function)(float) = nullptr;
    std::size_t transposed_columns = 0;  // 0: as stored
  };

  void add_matrix(StoredTensor tensor, std::size_t rows, std::size_t columns, PackedMatrix& target,
                  RowOrder order, std::vector<std::uint32_t> stored = {});
  StoredTensor require(const std::string& name, const std::vector<std::size_t>& shape);
  [[nodiscard]] DType packed_type(const StoredTensor& tensor) const;
  void add_vector(Vector vector);
  void refuse_unknown_tensors() const;

  const WeightSource& source_;
  std::optional<DType> weights_;
  std::vector<Matrix> matrices_;
  std::vector<Vector> vectors_;
  std::set<std::string, std::less<>> known_;
  std::size_t bytes_ = 0;
  std::size_t parameters_ = 0;
};

}  // namespace pocket
