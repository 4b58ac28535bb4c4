#include "load_parts.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "pocket/runtime/engine.h"

namespace pocket::test {
namespace {

constexpr std::size_t kContext = 64;
constexpr std::size_t kChunk = 3;
constexpr std::size_t kPrompt = 5;  // not a multiple of the chunk
constexpr std::size_t kBlockTokens = 16;

}  // namespace

std::vector<std::span<const std::uint8_t>> split_parts(std::span<const std::uint8_t> input) {
  constexpr std::string_view kMark = kPartMark;
  std::vector<std::span<const std::uint8_t>> parts;
  while (parts.size() + 1 < kMostParts) {
    const auto found = std::search(input.begin(), input.end(), kMark.begin(), kMark.end());
    if (found == input.end()) break;
    const auto size = static_cast<std::size_t>(found - input.begin());
    parts.push_back(input.first(size));
    input = input.subspan(size + kMark.size());
  }
  parts.push_back(input);
  return parts;
}

Folder::Folder()
    : path_(std::filesystem::temp_directory_path() /
            ("pocket-fuzz-" + std::to_string(::getpid()))) {
  std::filesystem::create_directories(path_);
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void Folder::write(const std::string& name, std::span<const std::uint8_t> bytes) const {
  // A new file each time: what a mapping of the last one still shows must not change under it.
  remove(name);
  std::ofstream out(path_ / name, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) {
    throw std::logic_error("cannot write " + name);
  }
}

void Folder::remove(const std::string& name) const {
  std::filesystem::remove(path_ / name);
}

void load_and_step(const std::filesystem::path& model) {
  const ModelInfo info = inspect_model(model, KvDType::kF16);
  const std::size_t context = std::min(info.context, kContext);
  const auto engine = Engine::load(model, {.num_blocks = kContext / kBlockTokens,
                                           .max_sequences = 1,
                                           .max_batch_tokens = kChunk,
                                           .max_context = context,
                                           .threads = 2});
  std::array<std::int32_t, kContext / kBlockTokens> table{};
  for (std::size_t block = 0; block < table.size(); ++block) {
    table[block] = static_cast<std::int32_t>(block);
  }
  const std::int32_t sequence = 0;
  const std::array<SamplingParams, 1> greedy{};
  const std::size_t prompt = std::min(kPrompt, context);
  for (std::size_t begin = 0; begin < prompt; begin += kChunk) {
    const std::size_t count = std::min(kChunk, prompt - begin);
    std::array<std::int32_t, kChunk> tokens{}, positions{};
    for (std::size_t i = 0; i < count; ++i) {
      tokens[i] = static_cast<std::int32_t>((begin + i) % info.vocab);
      positions[i] = static_cast<std::int32_t>(begin + i);
    }
    const std::array<std::int32_t, 2> offsets{0, static_cast<std::int32_t>(count)};
    const auto last = static_cast<std::int32_t>(count - 1);
    SampledToken sampled{};
    engine->step({.token_ids = std::span(tokens).first(count),
                  .positions = std::span(positions).first(count),
                  .sequence_offsets = offsets,
                  .block_tables = table,
                  .table_stride = table.size(),
                  .table_rows = {&sequence, 1},
                  .logits_rows = {&last, 1},
                  .sampling = greedy},
                 {.sampled = {&sampled, 1}, .logits = {}});
    // Weights that are no numbers give logits that are none.
    if (sampled.token == kUnusableLogits) {
      return;
    }
    if (sampled.token < 0 || static_cast<std::size_t>(sampled.token) >= info.vocab) {
      throw std::logic_error("sampled token " + std::to_string(sampled.token) + " of " +
                             std::to_string(info.vocab));
    }
  }
}

}  // namespace pocket::test
