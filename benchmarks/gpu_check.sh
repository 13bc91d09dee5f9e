#!/usr/bin/env bash
# All GPU checks in one call: GPU tests, then the tables in benchmarks/gpu, then a summary (the last lines).
#
#     benchmarks/gpu_check.sh [OUT]        # OUT: folder for logs and JSON, default runs/gpu_check
#
# Needs torch, triton, pytest and pytest-benchmark, no network; builds the native extension where pybind11 is there.
# Every stage has a time limit; together they stay under 6 minutes. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-runs/gpu_check}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
started=$SECONDS
limit=350

# run NAME SECONDS COMMAND...: at most SECONDS and what is left of the limit; output in OUT/NAME.log
run() {
  local name=$1 seconds=$2 status begin=$SECONDS
  shift 2
  local left=$((limit - (SECONDS - started)))
  if ((left < 10)); then
    echo "$name: skipped, out of time" >>"$out/stages.txt"
    return
  fi
  timeout -k 5 "$((seconds < left ? seconds : left))" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s" >>"$out/stages.txt"
}

: >"$out/stages.txt"
rm -f "$out"/*.log "$out"/*.json
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: torch finds no CUDA device here" >&2
  exit 2
fi
run build 60 "$python" setup.py build_ext --inplace
tests=(tests/goal_kernels/test_*_gpu.py)
# spread over processes where pytest-xdist is there: most of the time is compilation
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 4); fi
# -W default: another version's deprecation is no wrong result
run tests 140 "$python" -m pytest -q -W default -p no:cacheprovider "${workers[@]}" "${tests[@]}"
# quick ones first: where time runs out, it cuts one table and not three
tables=(benchmarks/gpu/{advantage,loss,conv,experts}.py)
for table in "${tables[@]}"; do
  run "$(basename "$table" .py)" 100 "$python" "$table" --out "$out"
done

echo "==== gpu_check summary ===="
cat "$out/stages.txt"
echo "---- tests ----"
tail -n 15 "$out/tests.log" 2>/dev/null | cut -c -240
for table in "${tables[@]}"; do
  echo "---- $(basename "$table" .py) ----"
  tail -n 16 "$out/$(basename "$table" .py).log" 2>/dev/null | cut -c -240
done
echo "total $((SECONDS - started)) s; logs and JSON in $out"
! grep -Ev ': exit 0,' "$out/stages.txt" | grep -qv '^build:'
