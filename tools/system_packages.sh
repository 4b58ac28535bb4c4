#!/bin/sh
# Installs the Debian packages that building and testing need, if they are missing and we may.
# With --check it only says what is missing; with --browser it also wants Chromium.
set -eu
missing=""
need() { [ -n "$2" ] || missing="$missing $1"; }
need g++ "$(command -v "${CXX:-c++}" || true)"
need make "$(command -v make || true)"
need git "$(command -v git || true)"
if [ -f /usr/include/doctest/doctest.h ] || [ -f /usr/local/include/doctest/doctest.h ]; then :; else
  missing="$missing doctest-dev"
fi
if ! "$(dirname "$0")/find_python.sh" >/dev/null 2>&1; then
  missing="$missing python3.11 python3.11-venv python3.11-dev"
fi
# A distribution's python3.11 keeps libpython, which Triton's stub links, in a package of its own.
if python=$("$(dirname "$0")/find_python.sh" 2>/dev/null); then
  "$python" - <<'PY' || missing="$missing libpython3.11 python3.11-dev"
import pathlib, sys, sysconfig
config = sysconfig.get_config_vars()
name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
folders = [config.get("LIBDIR") or "", f"{config.get('LIBDIR')}/{config.get('MULTIARCH')}"]
headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(not (headers.exists() and any(pathlib.Path(f, name).exists() for f in folders)))
PY
fi
[ "${1:-}" != --browser ] || need chromium "$(command -v chromium || true)"
may_install=""
if [ "${1:-}" != --check ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  may_install=yes
  # Only some tests of metrics and alerts need it, and they are skipped without: never demanded.
  need prometheus "$(command -v promtool || true)"
fi
[ -n "$missing" ] || exit 0
if [ -n "$may_install" ]; then
  echo "installing:$missing"
  apt-get update -qq
  # shellcheck disable=SC2086  # a list of package names
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "Missing packages: install them first (apt-get install$missing)." >&2
  exit 1
fi
