#pragma once

#include <string_view>

namespace pocket {

/// Instruction sets that have a kernel table, weakest first. `kAvx512` needs F, BW, VL, DQ and
/// VNNI.
enum class Isa { kScalar, kAvx2, kAvx512 };

/// The best set that this CPU and operating system offer.
[[nodiscard]] Isa detect_isa() noexcept;

/// `detect_isa()`, or what `POCKETLLM_ISA` (scalar, avx2, avx512) asks for. Throws
/// `Error(kInvalidArgument)` for an unknown name and `Error(kUnsupported)` for one the CPU lacks.
[[nodiscard]] Isa select_isa();

[[nodiscard]] std::string_view isa_name(Isa isa) noexcept;
[[nodiscard]] Isa parse_isa(std::string_view name);

}  // namespace pocket
