#include "pocket/cpu/isa.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "pocket/base/error.h"
#include "pocket/cpu/kernels.h"

using pocket::Error;
using pocket::Isa;

namespace {

/// Sets POCKETLLM_ISA for one scope and puts the old value back.
class IsaVariable {
 public:
  explicit IsaVariable(const char* value) {
    if (const char* old = std::getenv("POCKETLLM_ISA")) {
      old_ = old;
      had_ = true;
    }
    setenv("POCKETLLM_ISA", value, 1);
  }
  ~IsaVariable() {
    if (had_) {
      setenv("POCKETLLM_ISA", old_.c_str(), 1);
    } else {
      unsetenv("POCKETLLM_ISA");
    }
  }

 private:
  std::string old_;
  bool had_ = false;
};

}  // namespace

TEST_CASE("isa: names round-trip and unknown ones are refused") {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    CHECK(pocket::parse_isa(pocket::isa_name(isa)) == isa);
  }
  CHECK_THROWS_AS((void)pocket::parse_isa("sse9"), Error);
  CHECK_THROWS_AS((void)pocket::parse_isa(""), Error);
}

TEST_CASE("isa: POCKETLLM_ISA chooses, the CPU bounds the choice") {
  {
    const IsaVariable variable("scalar");
    CHECK(pocket::select_isa() == Isa::kScalar);
  }
  {
    const IsaVariable variable("");
    CHECK(pocket::select_isa() == pocket::detect_isa());
  }
  {
    const IsaVariable variable("neon");
    CHECK_THROWS_AS((void)pocket::select_isa(), Error);
  }
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    const IsaVariable variable(pocket::isa_name(isa).data());
    if (isa <= pocket::detect_isa()) {
      CHECK(pocket::select_isa() == isa);
    } else {
      CHECK_THROWS_AS((void)pocket::select_isa(), Error);
    }
  }
}

TEST_CASE("isa: there is a table for every set that this CPU has") {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= pocket::detect_isa()) {
      CHECK(pocket::kernel_table(isa).isa == isa);
    } else {
      MESSAGE("this CPU lacks " << pocket::isa_name(isa) << ": its kernels are not tested here");
      CHECK_THROWS_AS((void)pocket::kernel_table(isa), Error);
    }
  }
}
