#include "weight_loader.h"

#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "memory_source.h"
#include "pocket/base/error.h"
#include "pocket/cpu/kernels.h"

namespace pocket {
namespace {

using test::MemorySource;

std::vector<float> counting(std::size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

std::string message_of(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Rows of a packed matrix, through the kernel that the embedding uses.
std::vector<float> row_of(const PackedMatrix& w, std::size_t row) {
  std::vector<float> out(w.columns);
  kernel_table(Isa::kScalar).unpack_row(w, row, out.data());
  return out;
}

TEST_CASE("matrices packed in pieces on several threads equal their source") {
  MemorySource source;
  source.add("big", {1000, 32}, counting(32000));  // several tasks, a ragged last panel
  source.add("small", {3, 64}, counting(192));
  source.add("norm", {5}, {1, 2, 3, 4, 5});
  PackedMatrix big;
  PackedMatrix small;
  std::span<const float> norm;
  WeightLoader loader(source);
  loader.matrix("big", 1000, 32, big);
  loader.matrix("small", 3, 64, small);
  loader.vector("norm", 5, norm);
  ThreadPool pool(3);
  const PackedWeights weights = loader.load(pool);

  CHECK(weights.parameter_count == 32000 + 192 + 5);
  CHECK(source.releases == 1);
  CHECK(big.rows == 1000);
  for (std::size_t row = 0; row < 1000; ++row) {
    const std::vector<float> got = row_of(big, row);
    for (std::size_t column = 0; column < 32; ++column) {
      REQUIRE(got[column] == static_cast<float>(row * 32 + column));
    }
  }
  CHECK(row_of(small, 2)[63] == 191.0F);
  CHECK(std::vector<float>(norm.begin(), norm.end()) == std::vector<float>{1, 2, 3, 4, 5});
}

TEST_CASE("interleaved RoPE rows are brought into halves, head by head") {
  constexpr std::size_t kHeadDim = 48;
  constexpr std::size_t kHeads = 30;  // more rows than one task takes
  for (const std::size_t rotary : {48U, 16U}) {
    MemorySource source;
    source.add("q", {kHeads * kHeadDim, 32}, counting(kHeads * kHeadDim * 32));
    PackedMatrix q;
    WeightLoader loader(source);
    loader.matrix("q", kHeads * kHeadDim, 32, q, {.head_dim = kHeadDim, .rotary_dims = rotary});
    ThreadPool pool(2);
    const PackedWeights weights = loader.load(pool);
    for (std::size_t head = 0; head < kHeads; ++head) {
      for (std::size_t dim = 0; dim < kHeadDim; ++dim) {
        // Pair i of the file is (2i, 2i + 1); its members belong to dims i and i + rotary / 2.
        const std::size_t stored = dim < rotary / 2 ? 2 * dim
                                   : dim < rotary   ? 2 * (dim - rotary / 2) + 1
                                                    : dim;
        const std::size_t row = head * kHeadDim + dim;
        REQUIRE(row_of(q, row)[7] == static_cast<float>((head * kHeadDim + stored) * 32 + 7));
      }
    }
  }
}

TEST_CASE("a stack of matrices is taken apart, and rows of it") {
  MemorySource source;
  source.add("stack", {3, 40, 32}, counting(3 * 40 * 32));
  source.add("flat", {32}, counting(32));
  std::vector<PackedMatrix> lower(3), upper(3);
  PackedMatrix flat;
  WeightLoader loader(source);
  loader.stacked("stack", 40, 0, 24, 32, lower);
  loader.stacked("stack", 40, 24, 16, 32, upper);
  loader.matrix("flat", 1, 32, flat);
  CHECK(message_of([&] { loader.stacked("stack", 41, 0, 41, 32, lower); }) ==
        "memory: tensor stack has shape [3, 40, 32]; expected [3, 41, 32]");
  ThreadPool pool(2);
  const PackedWeights weights = loader.load(pool);
  CHECK(weights.parameter_count == 3 * 40 * 32 + 32);
  for (std::size_t index = 0; index < 3; ++index) {
    CHECK(lower[index].rows == 24);
    CHECK(upper[index].rows == 16);
    for (std::size_t row = 0; row < 40; ++row) {
      const float got = row < 24 ? row_of(lower[index], row)[5] : row_of(upper[index], row - 24)[5];
      REQUIRE(got == static_cast<float>((index * 40 + row) * 32 + 5));
    }
  }
  CHECK(flat.rows == 1);
  CHECK(row_of(flat, 0)[31] == 31.0F);
}

TEST_CASE("quantising at load leaves routers as they are") {
  MemorySource source;
  for (const char* name : {"w", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_inp_shexp.weight"}) {
    source.add(name, {16, 32}, counting(16 * 32));
  }
  PackedMatrix matrix, router, gate;
  WeightLoader loader(source, DType::kQ8_0);
  loader.matrix("w", 16, 32, matrix);
  loader.matrix("blk.0.ffn_gate_inp.weight", 16, 32, router);
  loader.matrix("blk.0.ffn_gate_inp_shexp.weight", 16, 32, gate);
  ThreadPool pool(1);
  const PackedWeights weights = loader.load(pool);
  CHECK(matrix.layout == PackedLayout::kU8Scale);
  CHECK(router.layout == PackedLayout::kF32);
  CHECK(gate.layout == PackedLayout::kF32);
}

TEST_CASE("missing, ill-shaped and unknown tensors are named") {
  MemorySource source;
  source.add("w", {4, 32}, counting(128));
  PackedMatrix w;
  WeightLoader loader(source);
  CHECK(message_of([&] { loader.matrix("v", 4, 32, w); }) ==
        "memory: tensor v is missing; expected [4, 32]");
  CHECK(message_of([&] { loader.matrix("w", 32, 4, w); }) ==
        "memory: tensor w has shape [4, 32]; expected [32, 4]");
  loader.matrix("w", 4, 32, w);
  source.add("w.bias", {4}, counting(4));
  ThreadPool pool(1);
  CHECK(message_of([&] { (void)loader.load(pool); }).find("w.bias") != std::string::npos);
}

}  // namespace
}  // namespace pocket
