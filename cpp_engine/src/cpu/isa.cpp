#include "pocket/cpu/isa.h"

#include <cpuid.h>

#include <cstdlib>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

constexpr std::string_view kVariable = "POCKETLLM_ISA";

// Read directly: Clang before 19 does not know the name in __builtin_cpu_supports. It uses AVX's
// registers, which the check for AVX2 covers.
bool has_f16c() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace

// libgcc's feature bits include the operating system's: it reads XGETBV and leaves a set out when
// its registers are not saved on a context switch.
Isa detect_isa() noexcept {
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && has_f16c();
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      __builtin_cpu_supports("avx512vnni") != 0;
  if (avx512) {
    return Isa::kAvx512;
  }
  return avx2 ? Isa::kAvx2 : Isa::kScalar;
}

Isa select_isa() {
  const Isa best = detect_isa();
  const char* wanted = std::getenv(kVariable.data());
  if (wanted == nullptr || *wanted == '\0') {
    return best;
  }
  const Isa isa = parse_isa(wanted);
  if (isa > best) {
    throw Error(ErrorCode::kUnsupported, std::string(kVariable) + "=" + std::string(wanted) +
                                             ": this CPU offers at most " +
                                             std::string(isa_name(best)) + "; unset the variable");
  }
  return isa;
}

std::string_view isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (name == isa_name(isa)) {
      return isa;
    }
  }
  throw Error(ErrorCode::kInvalidArgument, "unknown instruction set '" +
                                               std::string(name.substr(0, 16)) +
                                               "': use scalar, avx2 or avx512");
}

}  // namespace pocket
