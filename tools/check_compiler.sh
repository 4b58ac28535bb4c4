#!/bin/sh
# Fails with one sentence unless a C++20 compiler works.
compiler=${CXX:-c++}
if ! command -v "$compiler" >/dev/null 2>&1; then
  echo "No C++ compiler found ($compiler): install g++ 12 or newer (apt-get install g++), or set CXX." >&2
  exit 1
fi
if ! printf '#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n' |
  "$compiler" -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1; then
  echo "$compiler does not compile C++20 ($("$compiler" --version | head -1)): install g++ 12 or newer, or set CXX." >&2
  exit 1
fi
