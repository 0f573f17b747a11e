#!/usr/bin/env bash
# What needs a GPU, in at most nine minutes of an H100 or H200, the steps that matter most first:
#
#   tools/gpu_ten_minutes.sh FOLDER             # after make gpu, make vllm and make smollm
#   REHEARSE=1 tools/gpu_ten_minutes.sh FOLDER  # the same steps on a CPU, with a tiny model
#
# Each step has a limit of its own, and one that fails or is cut stops no other. FOLDER keeps a line
# in steps.jsonl and a log for each step as it ends. A second call does again what had not passed. The
# exit status is 1 where a step failed, was cut, or was never started for lack of time.
# PYTHON names another interpreter than .venv/bin/python.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -ne 1 ]; then
  echo "usage: tools/gpu_ten_minutes.sh FOLDER" >&2
  exit 2
fi
OUT=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
PYTHON=${PYTHON:-.venv/bin/python}
TOTAL=${TOTAL:-540} # seconds of all steps
SLOWER=${SLOWER:-1}   # a factor of each step's limit, for a rehearsal on a slow machine
COMPANION="$PYTHON -m sage_lib.pipeline.cli"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 SAGE_BUILD=$OUT/build SAGE_RESULTS=$OUT/results
export HF_HUB_OFFLINE=1 SAGE_GPU_MODEL=$OUT/build/models/smollm2-135m

step() { # step NAME LIMIT COMMAND...
  local name=$1 limit=$2 left=$((TOTAL - SECONDS)) started=$SECONDS
  shift 2
  limit=$((limit * SLOWER))
  if grep -qs "\"step\": \"$name\", \"status\": \"passed\"" "$OUT/steps.jsonl"; then return; fi
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    echo "$name: not started, the $TOTAL seconds are over"
    # What an earlier call found says more.
    grep -qs "\"step\": \"$name\"" "$OUT/steps.jsonl" ||
      echo "{\"step\": \"$name\", \"status\": \"not started\"}" >>"$OUT/steps.jsonl"
    return
  fi
  echo "$name: at most $limit s"
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  "$PYTHON" - "$name" $? $((SECONDS - started)) "$limit" "$OUT" <<'PY'
import json, re, sys
from pathlib import Path

name, status, seconds, limit, out = sys.argv[1:]
log = (Path(out) / f"{name}.log").read_text(errors="replace")
words = {"0": "passed", "124": "cut", "137": "cut"}
result = {"step": name, "status": words.get(status, "failed")}
if "skipped" in log and not re.search(r"\b[1-9]\d* passed", log) and status == "0":
    result["status"] = "skipped"
result |= {"seconds": int(seconds), "limit": int(limit), "end": log.splitlines()[-12:]}
with (Path(out) / "steps.jsonl").open("a") as file:
    file.write(json.dumps(result) + "\n")
print(f"{name}: {result['status']} after {seconds} s")
PY
}

if [ -n "${REHEARSE:-}" ]; then
  TRIAL=(--profile tools/gpu_rehearsal.yaml)
  SMOLLM=("${TRIAL[@]}")
  ENGINE=transformers SAMPLING=()
else
  TRIAL=(--profile tools/gpu_trial.yaml)
  SMOLLM=(--profile smollm --set compute.requires_gpu=true --set model.dtype=bfloat16 --set sft.bf16=true --set rl.bf16=true)
  ENGINE=vllm SAMPLING=(--set rl.use_vllm=true --set rl.vllm_mode=colocate --set rl.vllm_gpu_memory_utilization=0.3)
fi

step card 60 "$PYTHON" tools/gpu_card.py
step sft 90 $COMPANION stage sft "${TRIAL[@]}"
step kl_ref_on_unsloth 200 "$PYTHON" -m pytest tests/test_gpu.py -m gpu -rs -s -p no:xdist -k "starts_at_its_reference and unsloth"
step profile_to_its_table 150 $COMPANION reproduce "${TRIAL[@]}" --only 09 --yes
step guide_gain 90 $COMPANION guide-gain "${TRIAL[@]}" --engine $ENGINE --problems 8 --samples 8 --out "$OUT/guide_gain"
step smollm_sft 90 $COMPANION stage sft "${SMOLLM[@]}"
METHODS=(grpo branch_strong) SEEDS=(3407 3408 3409 3410 3411 3412)
[ -z "${REHEARSE:-}" ] || { METHODS=(grpo grpo_branch); SEEDS=(3407); }
for seed in "${SEEDS[@]}"; do
  for method in "${METHODS[@]}"; do
    step "smollm_$method-s$seed" 120 $COMPANION stage rl "${SMOLLM[@]}" "${SAMPLING[@]}" --run "$method-s$seed"
  done
done
"$PYTHON" - "$OUT" <<'PY'
import json, sys
from pathlib import Path

rows = map(json.loads, (Path(sys.argv[1]) / "steps.jsonl").open())
last = {row["step"]: row["status"] for row in rows}  # a step's last call counts
bad = ("failed", "cut", "not started")
failed = [f"{step}: {status}" for step, status in last.items() if status in bad]
sys.exit("\n".join(failed) or 0)
PY
