#!/usr/bin/env bash
# The compiled kernels on emulated arm64, from any x86-64 Debian or Ubuntu:
#
#     tools/arm64_test.sh                  all that `./course test --arm64` adds
#     tools/arm64_test.sh ARGUMENTS...     pytest with these ARGUMENTS on the emulated Python
#     CPU=cortex-a72 tools/arm64_test.sh tests/unit/test_kernels.py -k neon
#
# CPU is cortex-a76 (with the int8 dot product, as on the board; the default) or cortex-a72.
# The first call makes the emulated machine in .venv-arm64 (about a minute, 500 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || exec ./course test --only arm64
./course test --help >/dev/null  # makes the course's environment if there is none
folder=$PWD/.venv-arm64
tools/arm64/prepare.sh "$folder" .venv/bin/python
exec "$folder/python-${CPU:-cortex-a76}" -m pytest -q -p emulated -p no:cacheprovider "$@"
