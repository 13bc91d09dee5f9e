#!/bin/sh
# Runs the vocabulary tests with the extension built under AddressSanitizer and UndefinedBehaviorSanitizer.
#   csrc/fuzz/sanitize_tests.sh        from the repository, in an environment where the tests pass
# The sanitised extension lives in a scratch copy of the package; the installed one is left alone.
set -eu
cd "$(dirname "$0")/../.."
work=${TMPDIR:-/tmp}/goal-sanitized
rm -rf "$work"
mkdir -p "$work"
cp -r goal goal_kernels tests pyproject.toml "$work"
rm -f "$work"/goal_kernels/_native*.so
suffix=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
g++ -std=c++17 -O1 -g -fPIC -shared -fvisibility=hidden -pthread -ffp-contract=off -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize-recover=undefined $(python -m pybind11 --includes) csrc/*.cpp \
    -o "$work/goal_kernels/_native$suffix"
cd "$work"
# Python itself leaks by design, so only errors count.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$work" \
    python -m pytest -q -p no:cacheprovider tests/goal_kernels/test_vocabulary*.py "$@"
