#!/usr/bin/env bash
# Everything about the GPU in one command and ten minutes: builds the kernels, tests them, measures layers and training.
#
#   bash benchmarks/gpu_check.sh                 writes benchmarks/results/gpu_check_<machine>_<date>.md
#   bash benchmarks/gpu_check.sh /runs/results   writes there: for a checkout that this user cannot write to
#
# PYTHON=/path/to/python   an environment with the requirements, pytest and a PyTorch built for CUDA
#                          (default: .venv/bin/python where there is one, else python)
#
# GPU_CHECK_SECONDS=1800   the time for all (default 590)
#
# A part that fails, or runs over its share of the time, is recorded and the next one runs. Exit status: 0 if all is well,
# 1 if a part failed, 2 where there is no GPU to check.
set -uo pipefail
results=$(realpath -m -- "${1:-$(dirname "${BASH_SOURCE[0]}")/results}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

total_seconds=${GPU_CHECK_SECONDS:-590}
# part, its share of 590 seconds, what it is called in the report
parts=(
  "found 20 What was found"
  "build 150 Build of the kernels"
  "tests 200 Tests on the GPU"
  "layers 60 Bandwidth of the layers"
  "curves 60 Loss curves of both kinds of layers"
  "step 100 Largest micro-batch and throughput"
)

refuse() {
  echo "error: $1" >&2
  exit 2
}

# ---- the parts; each runs in a process of its own: bash benchmarks/gpu_check.sh --part NAME ----

part_found() {
  nvidia-smi || echo "nvidia-smi was not found"
  nvcc --version || echo "nvcc was not found on PATH"
  "$PYTHON" -c '
import platform, torch
print("Python", platform.python_version(), "PyTorch", torch.__version__, "CUDA", torch.version.cuda)
for index in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(index)
    print(f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB")
'
}

kernels_serve_this_gpu() {
  "$PYTHON" -c '
import sys, torch, tempo
kernels = tempo.kernels
missing = [op for op, how in kernels.summary("cuda").items() if how == "reference"]
covered = kernels.covers(kernels.cuda_architectures(), torch.cuda.get_device_capability())
print(kernels.describe(), "| without a CUDA kernel:", ", ".join(missing) or "none")
sys.exit(not covered)
'
}

part_build() {
  if [ -f tempo/_C.so ] && [ -z "$(find csrc setup.py -newer tempo/_C.so -print -quit)" ] && kernels_serve_this_gpu; then
    echo "the kernels are built already"
    return
  fi
  local capability
  capability=$("$PYTHON" -c 'import torch; print(*torch.cuda.get_device_capability(), sep="")') || return
  TEMPO_CUDA=1 TEMPO_CUDA_ARCHS="${TEMPO_CUDA_ARCHS:-$capability}" "$PYTHON" setup.py build_ext --inplace || return
  kernels_serve_this_gpu
}

# The tests of the layers run on the GPU too, but for those that are about CPUs, several processes, or (GELU beside its minimum)
# bounds that tests/gpu has for the device's own arithmetic.
part_tests() {
  local status=0 files=() name
  export TEMPO_TEST_KERNELS=required
  "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 -m gpu tests/gpu || status=$?
  for name in gelu layer_norm attention dropout; do files+=("tests/tempo/test_$name.py"); done
  TEMPO_TESTS_DEVICE=cuda "$PYTHON" -m pytest -q -p no:cacheprovider "${files[@]}" \
    -k "not ddp and not counter and not constant_gamma and not any_number and not least_y and not right_sign and not rounding_limit" ||
    status=$?
  return "$status"
}

part_layers() {
  "$PYTHON" -m benchmarks.layers --device cuda --output "$GPU_CHECK_WORK/layers.md"
}

# The same tiny BERT on the same real text and with the same dropout masks: the curves must agree.
part_curves() {
  local layers
  for layers in torch tempo; do
    "$PYTHON" run_pretraining.py --config configs/quickstart.yaml --data.path tests/data/nvidia_seq128_512rows.hdf5 \
      --data.num_workers 0 --model.layers "$layers" --model.dropout_generator philox --train.device cuda \
      --train.precision bf16 --train.max_steps 300 --train.eval_every 0 --train.checkpoint_every 300 \
      --train.log_every 1 --train.output_dir "$GPU_CHECK_WORK/$layers" || return
  done
  "$PYTHON" -m pretrain.compare "$GPU_CHECK_WORK/torch" "$GPU_CHECK_WORK/tempo" --output "$GPU_CHECK_WORK/compare.png" \
    --json "$GPU_CHECK_WORK/compare.json" || return
  "$PYTHON" -c '
import json, sys
work = sys.argv[1]
first = json.loads(open(work + "/torch/metrics.jsonl").readline())["loss"]
baseline, tempo = json.load(open(work + "/compare.json"))
largest, final = tempo["largest_difference"], tempo["final_loss"]
print("loss", first, "-> torch", baseline["final_loss"], "tempo", final, "largest difference", largest)
if largest is None or abs(largest) > 0.1:
    sys.exit("the curves differ by more than 0.1")
if not final < first - 1.0:
    sys.exit("the loss did not fall by 1")
' "$GPU_CHECK_WORK"
}

part_step() {
  "$PYTHON" -m benchmarks.step --device cuda --seconds 60 --output "$GPU_CHECK_WORK/step.md"
}

# ---- running them ----

find_python() {
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
  fi
  command -v "$PYTHON" >/dev/null || refuse "'$PYTHON' was not found: name a Python with PyTorch for CUDA, PYTHON=/path/to/python"
  export PYTHON
}

# Prints the name of the first GPU; where there is none, why not.
name_of_gpu() {
  "$PYTHON" -c '
import sys
try:
    import torch
except ImportError:
    sys.exit("PyTorch is not installed")
if torch.version.cuda is None:
    sys.exit(f"PyTorch {torch.__version__} is built without CUDA")
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no CUDA device")
print(torch.cuda.get_device_name(0))
'
}

# Runs a part until its deadline (what earlier parts left over is its own), and records how it went.
run_part() {
  local name=$1 deadline=$2 title=$3
  local log=$GPU_CHECK_WORK/$name.log seconds=$((deadline - SECONDS)) status=0 result start=$SECONDS
  printf '%s (at most %d s) ... ' "$title" "$seconds"
  if [ "$seconds" -lt 1 ]; then
    echo "there was no time left" >"$log"
    status=124
  else
    timeout --kill-after=5 "$seconds" bash benchmarks/gpu_check.sh --part "$name" >"$log" 2>&1 &
    wait $! || status=$?
  fi
  case $status in
    0) result="passed" ;;
    124 | 137) result="**failed**: ran out of its $seconds s" ;;
    *) result="**failed**: exit status $status" ;;
  esac
  if [ "$status" -ne 0 ]; then failed=1; fi
  echo "| $title | $result | $((SECONDS - start)) s |" >>"$GPU_CHECK_WORK/table"
  echo "$result, $((SECONDS - start)) s"
  if [ "$status" -ne 0 ]; then tail -n 15 "$log" | sed 's/^/    /'; fi
  write_section "$name" "$title" "$status"
}

# What a part wrote as Markdown goes in as it is, one level down; else the end of what it printed.
write_section() {
  local name=$1 title=$2 status=$3
  {
    printf '\n## %s\n\n' "$title"
    if [ "$status" -eq 0 ] && [ -f "$GPU_CHECK_WORK/$name.md" ]; then
      tail -n +3 "$GPU_CHECK_WORK/$name.md" | sed 's/^#/##/'
    else
      printf '```\n'
      tr '\r' '\n' <"$GPU_CHECK_WORK/$name.log" | tail -n 60
      printf '```\n'
    fi
  } >>"$GPU_CHECK_WORK/sections"
}

write_report() {
  local report=$1 machine=$2 verdict='all parts passed'
  if [ "$failed" -ne 0 ]; then verdict='**some parts failed**'; fi
  {
    printf '# Check of the GPU kernels\n\n'
    echo "- machine: $machine; driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
    "$PYTHON" -c 'import torch; print(f"- PyTorch {torch.__version__}, CUDA {torch.version.cuda}")'
    echo "- date: $(date +%F); command: \`bash benchmarks/gpu_check.sh\`; commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "- took $SECONDS s; $verdict"
    printf '\n| part | result | time |\n|---|---|---|\n'
    cat "$GPU_CHECK_WORK/table" "$GPU_CHECK_WORK/sections"
  } >"$report"
}

case "${1:-}" in
  -h | --help) sed -n '2,13s/^# \{0,1\}//p' benchmarks/gpu_check.sh; exit 0 ;;
  --part)
    case "${2:-}" in
      found) part_found ;;
      build) part_build ;;
      tests) part_tests ;;
      layers) part_layers ;;
      curves) part_curves ;;
      step) part_step ;;
      *) refuse "unknown part '${2:-}'" ;;
    esac
    exit
    ;;
  -*) refuse "unknown argument '$1' (try --help)" ;;
esac

[[ $total_seconds =~ ^[1-9][0-9]*$ ]] || refuse "GPU_CHECK_SECONDS must be a number of seconds, got '$total_seconds'"
find_python
GPU_CHECK_WORK=$(mktemp -d) || refuse "no folder for temporary files could be made"
export GPU_CHECK_WORK
trap 'rm -rf "$GPU_CHECK_WORK"' EXIT
trap 'kill "${!:-}" 2>/dev/null; exit 130' INT TERM
machine=$(name_of_gpu 2>"$GPU_CHECK_WORK/why") ||
  refuse "this needs an NVIDIA GPU with its driver and a PyTorch built for CUDA; with '$PYTHON': $(tail -n 1 "$GPU_CHECK_WORK/why")"
if ! mkdir -p "$results" 2>/dev/null || [ ! -w "$results" ]; then
  refuse "$results cannot be written to: name another folder, bash benchmarks/gpu_check.sh FOLDER"
fi

failed=0
shares=0
SECONDS=0
for part in "${parts[@]}"; do
  read -r name share title <<<"$part"
  shares=$((shares + share))
  run_part "$name" $((shares * total_seconds / 590)) "$title"
done
slug=$(echo "$machine" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^-*//; s/-*$//')
report="$results/gpu_check_${slug}_$(date +%F).md"
write_report "$report" "$machine"
echo "written to $report"
exit "$failed"
