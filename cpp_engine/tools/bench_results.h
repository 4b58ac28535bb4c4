#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/base/error.h"

namespace pocket::bench {

/// All samples of one figure, in order of first appearance.
class Results {
 public:
  explicit Results(bool best) : best_(best) {}

  void add(const std::string& workload, const std::string& metric, const std::string& unit,
           double value, std::size_t concurrency) {
    const std::string key = workload + "|" + metric;
    const auto [at, is_new] = index_.try_emplace(key, records_.size());
    if (is_new) {
      records_.push_back({workload, metric, unit, concurrency, {}});
    }
    records_[at->second].samples.push_back(value);
  }

  /// The figure that the table shows. The best sample is the smallest of seconds, else the largest.
  [[nodiscard]] double figure(const std::string& workload, const std::string& metric) const {
    const auto at = index_.find(workload + "|" + metric);
    if (at == index_.end()) {
      return 0.0;
    }
    const Record& r = records_[at->second];
    if (!best_) {
      return middle(r.samples);
    }
    return r.unit == "s" ? *std::min_element(r.samples.begin(), r.samples.end())
                         : *std::max_element(r.samples.begin(), r.samples.end());
  }

  void write_json(const std::string& path, std::string_view engine) const {
    std::ofstream file(path);
    file << "[";
    const char* separator = "\n";
    for (const Record& r : records_) {
      file << separator << R"(  {"bench": "bench_kernels", "engine": ")" << engine
           << R"(", "workload": ")" << r.workload << R"(", "concurrency": )" << r.concurrency
           << R"(, "metric": ")" << r.metric << R"(", "value": )" << middle(r.samples)
           << R"(, "unit": ")" << r.unit << R"(", "samples": [)";
      for (std::size_t i = 0; i < r.samples.size(); ++i) {
        file << (i == 0 ? "" : ", ") << r.samples[i];
      }
      file << "]}";
      separator = ",\n";
    }
    file << "\n]\n";
    if (!file.flush()) {
      throw Error(ErrorCode::kInvalidArgument, "--json: cannot write " + path);
    }
  }

 private:
  struct Record {
    std::string workload, metric, unit;
    std::size_t concurrency;
    std::vector<double> samples;
  };
  static double middle(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
  bool best_;
  std::vector<Record> records_;
  std::map<std::string, std::size_t> index_;
};

}  // namespace pocket::bench
