// Measures the kernel table over a working set like SmolLM2-135M's: every matmul of a step, then
// attention and the row kernels, beside the machine's own peaks measured in the same run.
//
//   bench_kernels [--json FILE] [--threads N] [--rounds N] [--isa NAME] [--formats a,b]
//                 [--rows a,b] [--statistic median|best]
//
// A figure in the table is the median over rounds, or the best (for a machine that others use,
// too); records carry the median and all samples. Peaks and kernels are interleaved, so that a
// neighbour who takes the CPU for a while hits both.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "bench_model.h"
#include "bench_results.h"
#include "machine_peaks.h"
#include "pocket/base/aligned_buffer.h"
#include "pocket/base/error.h"
#include "pocket/base/thread_pool.h"
#include "pocket/cpu/kernels.h"

namespace pocket::bench {
namespace {

struct Options {
  std::string json;
  std::size_t threads = 0;
  std::size_t rounds = 7;
  bool best = false;
  Isa isa = select_isa();
  std::vector<std::string> formats{"q4_1", "q4_0", "q8_0", "q5_0", "q5_1",   "q2_k",
                                   "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"};
  std::vector<std::size_t> rows{1, 2, 4, 8, 16, 64, 512};
};

struct Format {
  const char* name;
  DType type;
};
constexpr Format kFormats[] = {
    {"q4_1", DType::kQ4_1}, {"q4_0", DType::kQ4_0},     {"q8_0", DType::kQ8_0},
    {"q5_0", DType::kQ5_0}, {"q5_1", DType::kQ5_1},     {"q2_k", DType::kQ2_K},
    {"q3_k", DType::kQ3_K}, {"q4_k", DType::kQ4_K},     {"q5_k", DType::kQ5_K},
    {"q6_k", DType::kQ6_K}, {"iq4_nl", DType::kIQ4_NL}, {"iq4_xs", DType::kIQ4_XS},
    {"f16", DType::kF16},   {"bf16", DType::kBF16},     {"f32", DType::kF32},
};

template <typename Function>
double seconds(Function function) {
  const auto start = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// All matmuls of one step with `rows` tokens; the output head sees at most 16 rows, as in serving.
void run_step(const KernelTable& kernels, ThreadPool& pool, const ModelWeights& model,
              Activations& a, std::size_t rows) {
  std::size_t quantised_columns = 0;
  for (const PackedMatrix& w : model.matrices()) {
    const bool is_head = w.rows == kVocab;
    const std::size_t m = is_head ? std::min<std::size_t>(rows, 16) : rows;
    float* y = is_head ? a.head.data() : a.y.data();
    const std::size_t ldy = w.panels() * kPanelRows;
    if (w.quantised() && quantised_columns != w.columns) {
      const QuantisedRows all = a.rows_of(w.columns, rows);
      for (std::size_t row = 0; row < rows; ++row) {
        kernels.quantise_row(a.x.data() + row * w.columns, quantised_row(all, row, 0, w.columns));
      }
      quantised_columns = w.columns;
    }
    const std::size_t tasks = is_head ? 64 : 2 * pool.size();
    pool.parallel_for(tasks, [&](std::size_t task, std::size_t) {
      const std::size_t begin = w.panels() * task / tasks;
      const std::size_t end = w.panels() * (task + 1) / tasks;
      if (w.quantised()) {
        kernels.matmul_q8(w, a.rows_of(w.columns, m), begin, end, y, ldy);
      } else {
        kernels.matmul_f32(w, a.x.data(), w.columns, m, begin, end, y, ldy);
      }
    });
  }
}

void measure_peaks(ThreadPool& pool, std::span<const std::byte> set, Results& results) {
  const std::size_t threads = pool.size();
  const std::size_t part = set.size() / threads / 64 * 64;
  std::vector<unsigned long long> sink(threads * 8);
  const double read = seconds([&] {
    pool.parallel_for(threads, [&](std::size_t i, std::size_t) {
      sink[i * 8] = read_all(set.subspan(i * part, part));
    });
  });
  const auto gb = static_cast<double>(part * threads) / 1e9;
  results.add("peak", "read_bandwidth_gigabytes_per_second", "GB/s", gb / read, threads);
  const auto rate = [&](double (*operations)(std::size_t)) {
    std::vector<double> done(threads * 8);
    const double time = seconds([&] {
      pool.parallel_for(threads,
                        [&](std::size_t i, std::size_t) { done[i * 8] = operations(300'000); });
    });
    double sum = 0;
    for (const double d : done) {
      sum += d;
    }
    return sum / time / 1e9;
  };
  results.add("peak", "vnni_gigaops_per_second", "GOP/s", rate(vnni_operations), threads);
  results.add("peak", "fma_gigaflops_per_second", "GFLOP/s", rate(fma_operations), threads);
}

void bench_matmuls(const Options& options, ThreadPool& pool, const KernelTable& kernels,
                   Results& results) {
  const std::size_t most_rows = *std::max_element(options.rows.begin(), options.rows.end());
  Activations activations(most_rows);
  std::printf("%-6s %5s %10s %10s %10s %10s %7s %7s\n", "format", "rows", "ms/step", "tokens/s",
              "GB/s", "GOP/s", "%read", "%peak");
  for (const std::string& name : options.formats) {
    const auto* format = std::find_if(std::begin(kFormats), std::end(kFormats),
                                      [&](const Format& f) { return name == f.name; });
    if (format == std::end(kFormats)) {
      throw Error(ErrorCode::kInvalidArgument, "--formats: unknown format " + name);
    }
    const ModelWeights model(format->type, true);
    const auto workload = [&](std::size_t rows) { return name + "/rows=" + std::to_string(rows); };
    for (std::size_t round = 0; round < options.rounds; ++round) {
      measure_peaks(pool, model.bytes(), results);
      for (const std::size_t rows : options.rows) {
        const std::size_t repeats = std::max<std::size_t>(1, 16 / rows);
        const double time = seconds([&] {
                              for (std::size_t i = 0; i < repeats; ++i) {
                                run_step(kernels, pool, model, activations, rows);
                              }
                            }) /
                            static_cast<double>(repeats);
        double operations = 0;
        for (const PackedMatrix& w : model.matrices()) {
          const std::size_t m = w.rows == kVocab ? std::min<std::size_t>(rows, 16) : rows;
          operations += 2.0 * static_cast<double>(w.rows * w.columns * m);
        }
        results.add(workload(rows), "step_seconds", "s", time, rows);
        results.add(workload(rows), "weights_gigabytes_per_second", "GB/s",
                    static_cast<double>(model.bytes().size()) / time / 1e9, rows);
        results.add(workload(rows), "gigaops_per_second", "GOP/s", operations / time / 1e9, rows);
      }
    }
    const bool quantised = model.matrices().front().quantised();
    const double read = results.figure("peak", "read_bandwidth_gigabytes_per_second");
    const double compute =
        results.figure("peak", quantised ? "vnni_gigaops_per_second" : "fma_gigaflops_per_second");
    for (const std::size_t rows : options.rows) {
      const double time = results.figure(workload(rows), "step_seconds");
      const double bandwidth = results.figure(workload(rows), "weights_gigabytes_per_second");
      const double operations = results.figure(workload(rows), "gigaops_per_second");
      std::printf("%-6s %5zu %10.3f %10.0f %10.1f %10.0f %6.0f%% %6.0f%%\n", name.c_str(), rows,
                  time * 1e3, static_cast<double>(rows) / time, bandwidth, operations,
                  100 * bandwidth / read, compute > 0 ? 100 * operations / compute : 0.0);
    }
  }
}

/// One layer's attention for all KV heads, on one thread: decode (one row) and prefill (a tile).
void bench_attention(const Options& options, const KernelTable& kernels, Results& results) {
  struct Case {
    const char* name;
    std::size_t rows, context;
  };
  constexpr Case kCases[] = {{"decode", 1, 256},   {"decode", 1, 1024},   {"decode", 1, 4096},
                             {"prefill", 16, 256}, {"prefill", 16, 1024}, {"prefill", 16, 4096}};
  constexpr std::size_t kMaxBlocks = 4096 / kKvBlockTokens;
  std::printf("\n%-34s %12s %10s %7s\n", "attention (one KV head)", "us/call", "GFLOP/s", "%peak");
  for (const auto& [type, type_label] :
       {std::pair{KvDType::kF16, "f16/"}, std::pair{KvDType::kBF16, "bf16/"},
        std::pair{KvDType::kI8, "i8/"}, std::pair{KvDType::kF32, "f32/"}}) {
    const std::size_t block_elements = kv_block_elements(type, kHeadDim);
    AlignedBuffer pool(2 * kMaxBlocks * block_elements * 4);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> query(16 * kGroup * kHeadDim);
    for (float& q : query) {
      q = normal(random);
    }
    std::vector<float> k(kHeadDim), v(kHeadDim), out(query.size());
    std::vector<std::int32_t> table(kMaxBlocks);
    for (std::size_t i = 0; i < kMaxBlocks; ++i) {
      table[i] = static_cast<std::int32_t>((i * 37) % kMaxBlocks);
    }
    const std::size_t element = type == KvDType::kF32 ? 4 : type == KvDType::kI8 ? 1 : 2;
    std::byte* v_base = pool.data() + block_elements * element;
    for (std::size_t t = 0; t < 4096; ++t) {
      for (std::size_t d = 0; d < kHeadDim; ++d) {
        k[d] = normal(random);
        v[d] = normal(random);
      }
      const std::size_t block = static_cast<std::size_t>(table[t / 16]) * 2 * block_elements;
      kernels.kv_write(type, k.data(), v.data(), kHeadDim, t % 16, pool.data() + block * element,
                       v_base + block * element);
    }
    std::vector<float> scratch(attention_scratch_floats(16, kGroup, kHeadDim));
    for (const Case& c : kCases) {
      const AttentionTile tile{.query = query.data(),
                               .out = out.data(),
                               .row_stride = kGroup * kHeadDim,
                               .rows = c.rows,
                               .group = kGroup,
                               .head_dim = kHeadDim,
                               .first_position = c.context - c.rows,
                               .scale = 0.125f,
                               .k_base = pool.data(),
                               .v_base = v_base,
                               .block_stride = 2 * block_elements,
                               .block_table = table.data(),
                               .scratch = scratch.data()};
      const std::string workload =
          std::string("attention/") + type_label + c.name + "/context=" + std::to_string(c.context);
      const double flops = 4.0 * static_cast<double>(c.rows * kGroup * kHeadDim * c.context);
      const auto repeats = std::max<std::size_t>(3, static_cast<std::size_t>(2e8 / flops));
      for (std::size_t round = 0; round < options.rounds; ++round) {
        double peak_flops = 0;
        const double peak_time = seconds([&] { peak_flops = fma_operations(50'000); });
        results.add("peak", "fma_one_thread_gigaflops_per_second", "GFLOP/s",
                    peak_flops / peak_time / 1e9, 1);
        const double time = seconds([&] {
                              for (std::size_t i = 0; i < repeats; ++i) {
                                kernels.attention(type, tile);
                              }
                            }) /
                            static_cast<double>(repeats);
        results.add(workload, "call_seconds", "s", time, 1);
        results.add(workload, "gigaflops_per_second", "GFLOP/s", flops / time / 1e9, 1);
      }
      const double rate = results.figure(workload, "gigaflops_per_second");
      const double peak = results.figure("peak", "fma_one_thread_gigaflops_per_second");
      std::printf("%-34s %12.2f %10.1f %6.0f%%\n", workload.c_str(),
                  results.figure(workload, "call_seconds") * 1e6, rate,
                  peak > 0 ? 100 * rate / peak : 0.0);
    }
  }
}

/// The row kernels on one thread, one call each.
void bench_rows(const Options& options, const KernelTable& kernels, Results& results) {
  Activations a(1);
  std::vector<float> weight(kFfn, 1.0f), out(kFfn), logits(kVocab), angles(kHeadDim, 0.5f);
  std::mt19937 random(5);
  for (float& value : logits) {
    value = static_cast<float>(random() % 100'000);
  }
  std::size_t sink = 0;
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"rms_norm/576",
       [&] { kernels.rms_norm(a.x.data(), weight.data(), kHidden, 1e-5f, out.data()); }},
      {"quantise_row/576",
       [&] {
         kernels.quantise_row(a.x.data(), quantised_row(a.rows_of(kHidden, 1), 0, 0, kHidden));
       }},
      {"quantise_row/1536",
       [&] { kernels.quantise_row(a.x.data(), quantised_row(a.rows_of(kFfn, 1), 0, 0, kFfn)); }},
      {"silu_mul/1536", [&] { kernels.silu_mul(a.x.data(), weight.data(), kFfn, out.data()); }},
      {"add/576", [&] { kernels.add(out.data(), weight.data(), kHidden); }},
      {"rope/12 heads",
       [&] { kernels.rope(out.data(), 12, kHeadDim, angles.data(), angles.data()); }},
      {"argmax/49152", [&] { sink += kernels.argmax(logits.data(), kVocab); }},
  };
  std::printf("\n%-34s %12s\n", "row kernel", "ns/call");
  for (const auto& [name, call] : cases) {
    const std::string workload = std::string("rows/") + name;
    const std::size_t repeats = std::string_view(name).starts_with("argmax") ? 200 : 5000;
    for (std::size_t round = 0; round < options.rounds; ++round) {
      const double time = seconds([&] {
                            for (std::size_t i = 0; i < repeats; ++i) {
                              call();
                            }
                          }) /
                          static_cast<double>(repeats);
      results.add(workload, "call_seconds", "s", time, 1);
    }
    std::printf("%-34s %12.0f\n", name, results.figure(workload, "call_seconds") * 1e9);
  }
  if (sink == 1) {
    std::puts("");  // keeps argmax alive
  }
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::size_t positive(std::string_view flag, const std::string& text) {
  const long value = std::strtol(text.c_str(), nullptr, 10);
  if (value < 1 || value > 4096) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(flag) + ": '" + text + "' is not a number from 1 to 4096");
  }
  return static_cast<std::size_t>(value);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (i + 1 == argc) {
      throw Error(ErrorCode::kInvalidArgument, std::string(flag) + " needs a value");
    }
    const std::string value = argv[++i];
    if (flag == "--json") {
      options.json = value;
    } else if (flag == "--threads") {
      options.threads = positive(flag, value);
    } else if (flag == "--rounds") {
      options.rounds = positive(flag, value);
    } else if (flag == "--statistic") {
      if (value != "median" && value != "best") {
        throw Error(ErrorCode::kInvalidArgument, "--statistic: median or best, not " + value);
      }
      options.best = value == "best";
    } else if (flag == "--isa") {
      options.isa = parse_isa(value);
    } else if (flag == "--formats") {
      options.formats = split(value);
    } else if (flag == "--rows") {
      options.rows.clear();
      for (const std::string& part : split(value)) {
        options.rows.push_back(positive(flag, part));
      }
    } else {
      throw Error(ErrorCode::kInvalidArgument, "unknown option " + std::string(flag));
    }
  }
  return options;
}

int run(int argc, char** argv) {
  Options options = parse(argc, argv);
  const KernelTable& kernels = kernel_table(options.isa);
  ThreadPool pool(options.threads);
  options.threads = pool.size();
  Results results(options.best);
  std::printf("isa %s, %zu threads, %s of %zu rounds\n", std::string(isa_name(options.isa)).c_str(),
              pool.size(), options.best ? "best" : "medians", options.rounds);
  bench_matmuls(options, pool, kernels, results);
  std::printf("peaks: read %.1f GB/s, vpdpbusd %.0f GOP/s, fp32 FMA %.0f GFLOP/s\n",
              results.figure("peak", "read_bandwidth_gigabytes_per_second"),
              results.figure("peak", "vnni_gigaops_per_second"),
              results.figure("peak", "fma_gigaflops_per_second"));
  bench_attention(options, kernels, results);
  bench_rows(options, kernels, results);
  if (!options.json.empty()) {
    results.write_json(options.json, "pocketllm");
  }
  return 0;
}

}  // namespace
}  // namespace pocket::bench

int main(int argc, char** argv) {
  try {
    return pocket::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_kernels: %s\n", error.what());
    return 2;
  }
}
