#pragma once

#include <cstddef>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/sampling/logit_edits.h"

namespace pocket::python {

/// The Python object LogitEdits: edits that refuse to be changed while a step, which has let the
/// GIL go, reads them. All members are used with the GIL held, which orders the count.
class PyLogitEdits {
 public:
  PyLogitEdits(LogitOptions options, std::size_t vocab)
      : edits_(std::move(options), vocab), vocab_(vocab) {}

  [[nodiscard]] const LogitEdits& read() const noexcept { return edits_; }
  [[nodiscard]] std::size_t vocab() const noexcept { return vocab_; }

  LogitEdits& write() {
    if (readers_ != 0) {
      throw Error(ErrorCode::kInvalidArgument, "edits: a step in progress is reading them");
    }
    return edits_;
  }

  /// Marks the edits as being read, for the lifetime of the object.
  class Reading {
   public:
    explicit Reading(PyLogitEdits& edits) noexcept : edits_(&edits) { ++edits.readers_; }
    Reading(Reading&& other) noexcept : edits_(std::exchange(other.edits_, nullptr)) {}
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    Reading& operator=(Reading&&) = delete;
    ~Reading() {
      if (edits_ != nullptr) {
        --edits_->readers_;
      }
    }

   private:
    PyLogitEdits* edits_;
  };

 private:
  LogitEdits edits_;
  std::size_t vocab_;
  std::size_t readers_ = 0;
};

}  // namespace pocket::python
