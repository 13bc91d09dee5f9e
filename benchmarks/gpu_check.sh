#!/usr/bin/env bash
# All GPU checks in one call: GPU tests, then the tables in benchmarks/gpu, then a summary (the last lines).
#
#     benchmarks/gpu_check.sh [OUT]        # OUT: folder for logs and JSON, default runs/gpu_check
#
# Needs torch, triton and pytest, no network, no C++ extension; uses pytest-xdist where it is there. PYTHON names the
# interpreter, LIMIT the seconds it may take (350). Ends with 0 where every stage did, with 1 where a test failed, a row
# has no times or a stage was cut, and with 2 where there is no CUDA device.
#
# First, side by side, what takes the CPU: the tests, and what the tables compile, into the caches on disk. Then the
# tables one after another, alone on the card. Last, what may be cut: the tests that need most of its memory.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-runs/gpu_check}
limit=${LIMIT:-350}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
started=$SECONDS

# run NAME SECONDS COMMAND...: at most SECONDS and what is left of the limit; output in OUT/NAME.log
run() {
  local name=$1 seconds=$2 status begin=$SECONDS
  shift 2
  local left=$((limit - (SECONDS - started)))
  if ((left < 1)); then
    echo "$name: skipped, out of time" >>"$out/stages.txt"
    return
  fi
  # interrupted first: pytest then still prints its summary
  timeout -s INT -k 5 "$((seconds < left ? seconds : left))" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s" >>"$out/stages.txt"
}

# count LOG: how many tests ended, and how, by the lines they leave while they run
count() {
  grep -E '\[ *[0-9]+%\]' "$1" 2>/dev/null | grep -oE 'PASSED|FAILED|ERROR|SKIPPED' | sort | uniq -c | tr -s ' \n' ' '
  echo
  grep -E '\[ *[0-9]+%\]' "$1" 2>/dev/null | grep -E 'FAILED|ERROR' | head -n 8 | cut -c -160
}

: >"$out/stages.txt"
rm -f "$out"/*.log "$out"/*.json
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: torch finds no CUDA device here" >&2
  exit 2
fi
tables=(benchmarks/gpu/{advantage,loss,conv,experts}.py)
# -v: a run that is cut still says which tests ended; -W default: another version's deprecation is no wrong result
pytest=("$python" -m pytest -v -W default -p no:cacheprovider tests/goal_kernels/test_*_gpu.py)
large="more_than_two_to_the_31"
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then
  cores=$(nproc)
  # tests that need most of the card's memory are one group: one worker runs them in turn
  workers=(-n "$((cores > 8 ? cores - 6 : 2))" --dist loadgroup)
fi

for table in "${tables[@]}"; do
  run "build-$(basename "$table" .py)" 140 "$python" "$table" --build &
done
run tests 150 "${pytest[@]}" "${workers[@]}" -k "not $large" &
wait
run advantage 30 "$python" "${tables[0]}" --out "$out"
run loss 40 "$python" "${tables[1]}" --out "$out"
run conv 65 "$python" "${tables[2]}" --out "$out"
run experts 65 "$python" "${tables[3]}" --out "$out"
run large-tests 60 "${pytest[@]}" -k "$large"

echo "==== gpu_check summary ===="
cat "$out/stages.txt"
for name in tests large-tests; do
  echo "---- $name ----"
  count "$out/$name.log"
  tail -n 6 "$out/$name.log" 2>/dev/null | cut -c -240
done
for table in "${tables[@]}"; do
  echo "---- $(basename "$table" .py) ----"
  tail -n 12 "$out/$(basename "$table" .py).log" 2>/dev/null | cut -c -240
done
echo "total $((SECONDS - started)) s; logs and JSON in $out"
# a table whose build was cut compiles what is missing itself
! grep -v '^build-' "$out/stages.txt" | grep -qv ': exit 0,'
