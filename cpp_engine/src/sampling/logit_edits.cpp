#include "pocket/sampling/logit_edits.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "pocket/base/error.h"

namespace pocket {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

[[noreturn]] void fail(const char* field, double value, const char* remedy) {
  throw Error(ErrorCode::kInvalidArgument,
              std::string(field) + ": got " + std::to_string(value) + "; " + remedy);
}

// A division by a tiny penalty may overflow, and +inf marks a broken row.
float bounded(float before, float after) {
  return after == kInf && before < kInf ? kLargest : after;
}

constexpr std::size_t kWordBits = 32;

constexpr std::array<std::uint32_t, kWordBits> kBit = [] {
  std::array<std::uint32_t, kWordBits> bits{};
  for (std::size_t i = 0; i < kWordBits; ++i) {
    bits[i] = 1U << i;
  }
  return bits;
}();

// Applies one word of a mask; not 0 if it overwrote a NaN or +inf. Bits instead of branches and
// shifts: it vectorises with the oldest instruction set. `Fixed`: the count when known, else 0.
template <std::size_t Fixed>
std::uint32_t mask_run(float* x, std::uint32_t word, std::size_t count) {
  constexpr auto kMinusInf = std::bit_cast<std::uint32_t>(-kInf);
  std::uint32_t broken = 0;
  const std::size_t n = Fixed != 0 ? Fixed : count;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t drop = (word & kBit[i]) == 0 ? ~0U : 0U;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]);
    broken |= drop & (x[i] < kInf ? 0U : ~0U);
    x[i] = std::bit_cast<float>((bits & ~drop) | (kMinusInf & drop));
  }
  return broken;
}

// False for NaN and +inf.
bool usable(float logit) {
  return logit < kInf;
}

}  // namespace

LogitEdits::LogitEdits(LogitOptions options, std::size_t vocab)
    : options_(std::move(options)), vocab_(vocab) {
  const LogitOptions& o = options_;
  if (!std::isfinite(o.repetition_penalty) || o.repetition_penalty <= 0.0F) {
    fail("repetition_penalty", o.repetition_penalty, "must be finite and above 0");
  }
  if (!std::isfinite(o.presence_penalty)) {
    fail("presence_penalty", o.presence_penalty, "must be finite");
  }
  if (!std::isfinite(o.frequency_penalty)) {
    fail("frequency_penalty", o.frequency_penalty, "must be finite");
  }
  for (const LogitBias& entry : o.bias) {
    check_token("bias", entry.token);
    if (!std::isfinite(entry.bias)) {
      fail("bias", entry.bias, "must be finite");
    }
  }
  for (const std::int32_t token : o.banned) {
    check_token("banned", token);
  }
  for (const std::int32_t token : o.ending) {
    check_token("ending", token);
  }
  if (o.repetition_penalty != 1.0F || o.presence_penalty != 0.0F || o.frequency_penalty != 0.0F) {
    history_.emplace(vocab);
  }
}

void LogitEdits::check_token(const char* field, std::int32_t token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= vocab_) {
    throw Error(ErrorCode::kInvalidArgument, std::string(field) + ": got token " +
                                                 std::to_string(token) + "; must be from 0 to " +
                                                 std::to_string(vocab_ - 1));
  }
}

void LogitEdits::reset_history(std::span<const std::int32_t> tokens, std::size_t num_prompt) {
  if (num_prompt > tokens.size()) {
    fail("num_prompt", static_cast<double>(num_prompt), "must not exceed the number of tokens");
  }
  for (const std::int32_t token : tokens) {
    check_token("tokens", token);
  }
  length_ = tokens.size();
  if (!history_) {
    return;
  }
  history_->clear();
  if (options_.repetition_penalty != 1.0F) {  // nothing else looks at the prompt
    for (const std::int32_t token : tokens.first(num_prompt)) {
      history_->add_prompt(token);
    }
  }
  for (const std::int32_t token : tokens.subspan(num_prompt)) {
    history_->add_output(token);
  }
}

void LogitEdits::append(std::int32_t token) {
  check_token("token", token);
  ++length_;
  if (history_) {
    history_->add_output(token);
  }
}

bool LogitEdits::apply(std::span<float> row, std::uint64_t token_index) const {
  const auto inside = [&](std::int32_t token) {
    return static_cast<std::size_t>(token) < row.size();
  };
  for (const LogitBias& entry : options_.bias) {
    if (inside(entry.token)) {
      float& x = row[static_cast<std::size_t>(entry.token)];
      x = bounded(x, x + entry.bias);
    }
  }
  if (history_) {
    const float repetition = options_.repetition_penalty;
    for (const std::int32_t token : history_->distinct()) {
      if (!inside(token)) {
        continue;
      }
      // Selects, not branches: signs and counts are as good as random. x / 1, x * 1 and x - 0 are
      // x.
      float& logit = row[static_cast<std::size_t>(token)];
      const std::int32_t count = history_->output_count(token);
      const float divided = logit / repetition;
      const float multiplied = logit * repetition;
      float x = bounded(logit, logit > 0.0F ? divided : multiplied);
      x = bounded(x, x - options_.frequency_penalty * static_cast<float>(count));
      logit = bounded(x, x - (count > 0 ? options_.presence_penalty : 0.0F));
    }
  }
  bool ok = true;
  const auto ban = [&](std::span<const std::int32_t> tokens) {
    for (const std::int32_t token : tokens) {
      if (inside(token)) {
        float& x = row[static_cast<std::size_t>(token)];
        ok = ok && usable(x);
        x = -kInf;
      }
    }
  };
  ban(options_.banned);
  if (token_index < options_.min_tokens) {
    ban(options_.ending);
  }
  return ok;
}

bool apply_allowed(std::span<float> row, std::span<const std::int32_t> words) {
  std::uint32_t broken = 0;
  const std::size_t whole = row.size() / kWordBits;
  for (std::size_t i = 0; i < whole; ++i) {
    const auto word = std::bit_cast<std::uint32_t>(words[i]);
    if (word != 0xFFFFFFFFU) {
      broken |= mask_run<kWordBits>(row.data() + i * kWordBits, word, kWordBits);
    }
  }
  if (whole * kWordBits < row.size()) {
    broken |=
        mask_run<0>(row.data() + whole * kWordBits, std::bit_cast<std::uint32_t>(words[whole]),
                    row.size() - whole * kWordBits);
  }
  return broken == 0;
}

}  // namespace pocket
