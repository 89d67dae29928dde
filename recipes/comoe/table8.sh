#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 8: time and memory of training, and of a batch of 16 generated answers.
#
# Memory is that beside the model's weights: the device's peak, or on the CPU that of the process.
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 2 to 4 hours a row:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa \
#     recipes/comoe/table8.sh
# A model of your own is the argument: recipes/comoe/table8.sh MODEL. See run.py for all settings.
# TIMED_TOKENS says how long answers are (default: 32); the paper doesn't say. OMoE is left out.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table8}
export TIMED_TOKENS=${TIMED_TOKENS:-32}
"${PYTHON:-python}" "$here/run.py" multi "$@" <<'ROWS'
LoRA: --peft lora --rank 80
DoRA: --peft dora --rank 80
8 experts: --experts 8 --contrastive 0
CoMoE-LoRA: --experts 4
ROWS
