#pragma once

#include <cstddef>
#include <span>

namespace pocket::bench {

/// Bytes a read loop takes in: sums `data` with the widest loads at hand. Returns a value that
/// depends on every byte, so that nothing is optimised away.
[[nodiscard]] unsigned long long read_all(std::span<const std::byte> data);

/// Runs `iterations` x 16 independent VPDPBUSD (512 bit) and returns the integer operations done
/// (128 per instruction); 0 on a CPU without AVX-512 VNNI.
[[nodiscard]] double vnni_operations(std::size_t iterations);

/// The same with fused multiply-adds on floats, 512 or 256 bit; 0 without FMA.
[[nodiscard]] double fma_operations(std::size_t iterations);

}  // namespace pocket::bench
