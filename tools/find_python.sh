#!/bin/sh
# Prints the first interpreter that can run PocketLLM, or says in one sentence what is missing.
# Triton's Python stub exists for CPython only and links libpython, hence the shared-library check.
check='
import sys, sysconfig, pathlib
if sys.version_info[:2] not in ((3, 11), (3, 12)): sys.exit(2)
try:
    import venv, ensurepip
except ImportError: sys.exit(3)
'
for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
  "$candidate" -c "$check" >/dev/null 2>&1 && { echo "$candidate"; exit 0; }
done
found=$(python3 --version 2>/dev/null || echo "no python3")
echo "PocketLLM needs Python 3.11 or 3.12 with venv (found: $found): install python3.11 and python3.11-venv, or set PYTHON=/path/to/python3.11." >&2
exit 1
