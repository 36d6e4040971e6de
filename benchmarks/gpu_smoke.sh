#!/usr/bin/env bash
# One prepared GPU check: random 1–2 B OLMoE from a config, and the zoo. No network; at most 8 minutes; prints figures.
#
#     bash benchmarks/gpu_smoke.sh [OUT]
#
# Needs a Python with torch (CUDA), transformers and lm-eval, or installs what is missing with pip. Set DEVICE=cpu and
# SIZE=tiny to rehearse the script itself on a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/gpu_smoke}
device=${DEVICE:-cuda}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD/harness${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
python -c 'import torch, transformers, lm_eval, datasets, tabulate, rich' 2>/dev/null || pip install -q -e . >"$out/pip.log" 2>&1

deadline=$((SECONDS + 460))
limited() { # COMMAND…: run it for what is left of the eight minutes
  local left=$((deadline - SECONDS))
  if [ "$left" -lt 20 ]; then
    echo "left out, no time: $*"
  else
    timeout --signal=INT "$left" "$@"
  fi
}
echo "== score pass, integrity, memory: random OLMoE"
limited python benchmarks/gpu_smoke.py --device "$device" --size "${SIZE:-full}" | tee "$out/random_olmoe.txt"
for model in $(python -m prunebench.cli list --json | python -c 'import json, sys; print(*json.load(sys.stdin)["models"])'); do
  for dtype in float32 bfloat16; do
    echo "== $model, $dtype, reap at 50 %, multiple choice"
    limited python -m prunebench.cli run --model "$model" --method reap --ratio 0.5 --suite multiple_choice \
      --device "$device" --dtype "$dtype" --out "$out/records" | tee "$out/$model-$dtype.txt"
  done
done
