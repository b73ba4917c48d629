#!/usr/bin/env bash
# Everything that is checked before a change lands: lint, types, build, tests. .ci/run calls it.
#
#   bash scripts/test.sh              all of it
#   bash scripts/test.sh tests/tempo  lint and types, and these tests (arguments go to pytest)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "Install"
bash scripts/install.sh --dev
# timm's LAMB is compared with ours; its dependency torchvision is not needed for that, and weighs gigabytes.
.venv/bin/pip install --quiet --no-deps timm==1.0.31

say "Lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/shellcheck scripts/*.sh benchmarks/*.sh .ci/run

say "Types"
.venv/bin/mypy

say "Build: the tempo package installs and imports on its own"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
.venv/bin/pip install --quiet --no-deps --target "$build" .
(cd "$build" && "$OLDPWD/.venv/bin/python" -c 'import tempo; print("tempo", tempo.__version__, tempo.kernels.summary())')

say "Tests"
# One thread per process: two busy processes on two cores, and sums in the same order everywhere. The compiled layers were
# built above: their tests must not skip.
TEMPO_TEST_KERNELS=required OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n "${TEST_PROCESSES:-auto}" --dist loadfile "$@"
