#!/bin/sh
# Fuzzes the native tokenizer under AddressSanitizer and UndefinedBehaviorSanitizer.
#   csrc/fuzz/run.sh [seconds, default 600] [compiler, default clang++]
# Needs clang with libFuzzer (Debian: apt-get install clang-14 libclang-rt-14-dev, then compiler clang++-14).
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-600}
compiler=${2:-clang++}
work=${TMPDIR:-/tmp}/goal-fuzz
mkdir -p "$work/corpus"
"$compiler" -std=c++17 -O2 -g -pthread -ffp-contract=off -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all fuzz/fuzz_vocabulary.cpp accumulator.cpp counter.cpp grid.cpp residuals.cpp \
    tokenizer.cpp vocabulary.cpp -o "$work/fuzz_vocabulary"
"$work/fuzz_vocabulary" -max_total_time="$seconds" -max_len=4096 -len_control=0 -artifact_prefix="$work/" "$work/corpus"
