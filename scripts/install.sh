#!/usr/bin/env bash
# Makes .venv/ in the repository root with everything that tempo-bert needs, pinned. Run again, it installs only what changed.
#
#   bash scripts/install.sh          what training and data preparation need
#   bash scripts/install.sh --dev    the same, and what scripts/test.sh needs
#
# PYTHON=python3.12   the interpreter to make the environment with (default: the newest of 3.10 to 3.14 on PATH)
# TORCH="torch==2.11.0"   another PyTorch (2.10 to 2.14 are supported; a path to a wheel works as well)
# TEMPO_CUDA=1|0          build the CUDA kernels or leave them out (default: where nvcc is found and PyTorch has CUDA)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=requirements.txt
case "${1:-}" in
  "") ;;
  --dev) requirements="requirements-dev.txt" ;;
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "error: unknown argument '$1' (try --help)" >&2; exit 2 ;;
esac

torch_pin="torch==2.13.0"
torch_cpu_index="https://download.pytorch.org/whl/cpu"

say() { printf '\033[1m%s\033[0m\n' "$*"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: needs Python 3.10 to 3.14, and found none; install one, or name it: PYTHON=/path/to/python3 bash scripts/install.sh" >&2
  exit 2
}

make_environment() {
  local python
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    say "Making .venv with $("$python" --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv; then
      rm -rf .venv
      echo "error: '$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
      exit 2
    fi
  fi
}

# True where the index of CPU builds answers at all: a closed network must not cost minutes of retries.
cpu_index_answers() {
  .venv/bin/python - "$torch_cpu_index/" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

install_torch() {
  if .venv/bin/python -c 'import sys, torch; sys.exit(not (2, 10) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 14))' \
    2>/dev/null && [ -z "${TORCH:-}" ]; then
    return
  fi
  if [ -n "${TORCH:-}" ]; then
    say "Installing $TORCH"
    .venv/bin/pip install "$TORCH"
  elif [ "$(uname -s)" = Linux ] && cpu_index_answers; then
    say "Installing $torch_pin, the CPU build"
    .venv/bin/pip install --index-url "$torch_cpu_index" "$torch_pin"
  else
    say "Installing $torch_pin from the package index (on x86-64 Linux that may be the CUDA build: about 3 GB)"
    .venv/bin/pip install "$torch_pin"
  fi
}

# The stamp names what was installed, so that a second run is instant and a changed pin is not missed.
install_requirements() {
  local stamp=.venv/installed_requirements.txt
  if cmp -s "$requirements" "$stamp"; then
    return
  fi
  # What the developers' list names includes what the users' list names.
  if [ "$requirements" = requirements.txt ] && cmp -s requirements-dev.txt "$stamp"; then
    return
  fi
  say "Installing $requirements"
  .venv/bin/pip install -r "$requirements"
  cp "$requirements" "$stamp"
}

# The compiled layers, built in place (tempo/_C.so); again only where their sources or PyTorch changed. A PyTorch without CUDA
# cannot use CUDA kernels: they are left out of this environment even where nvcc is found.
build_kernels() {
  local stamp=.venv/built_kernels.txt sources
  if [ -z "${TEMPO_CUDA:-}" ] && .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    export TEMPO_CUDA=0
  fi
  sources=$(cat setup.py csrc/*/*.{cpp,h,cu,cuh} tempo/_library.py | cksum)
  sources="$sources ${TEMPO_CUDA:-auto} ${TEMPO_CUDA_ARCHS:-} $(.venv/bin/python -c 'import torch; print(torch.__version__)')"
  if ls tempo/_C*.so >/dev/null 2>&1 && [ "$(cat "$stamp" 2>/dev/null)" = "$sources" ]; then
    return
  fi
  say "Building the compiled layers"
  .venv/bin/pip install --no-build-isolation --no-deps --editable .
  echo "$sources" >"$stamp"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
make_environment
install_torch
install_requirements
build_kernels
