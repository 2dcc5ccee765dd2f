#!/usr/bin/env bash
# Run the kernel tests under compute-sanitizer, one process for each test file, as many at once as there are cores. Needs an NVIDIA GPU
# and the CUDA toolkit.
#   tests/sanitize.sh [seconds a file may take] [tools, default: memcheck racecheck]
#   FILES="tests/kernels/test_ratio.py ..." tests/sanitize.sh ...     some files only
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
limit=${1:-300}
shift || true
logs=$(mktemp -d)
export XLA_PYTHON_CLIENT_PREALLOCATE=false
check() { # tool, file
  local name
  name=$1.$(basename "$2" .py)
  # Without torch's cache every tensor is an allocation of its own, so that stepping over its end is seen.
  [ "$1" = memcheck ] && export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  timeout -s KILL "$limit" compute-sanitizer --tool "$1" --target-processes application-only --error-exitcode 9 --log-file "$logs/$name.log" \
    python3 -m pytest -q -p no:cacheprovider -p no:xdist --hypothesis-profile=few -k "not reference" "$2" >"$logs/$name.out" 2>&1 </dev/null
  local code=$?
  echo "$name: $(tail -n 1 "$logs/$name.out") | $(grep -h SUMMARY "$logs/$name.log" | tail -n 1)"
  return $code
}
failed=0
for tool in ${*:-memcheck racecheck}; do
  for file in ${FILES:-tests/kernels/test_*.py}; do
    if [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; then wait -n || failed=1; fi
    check "$tool" "$file" &
  done
done
while [ -n "$(jobs -p)" ]; do wait -n || failed=1; done
exit $failed
