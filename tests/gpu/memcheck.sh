#!/bin/sh
# compute-sanitizer over the monokernel on small models; exit 0: clean. `memcheck.sh initcheck` runs another of its tools.
set -eu
cd "$(dirname "$0")/../.."
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$sanitizer" --tool "${1:-memcheck}" --error-exitcode 9 --launch-timeout 300 "${PYTHON:-python3}" tests/gpu/memcheck.py
