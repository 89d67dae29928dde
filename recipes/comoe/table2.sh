#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 2: each task tuned on its own.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 10 hours a row and seed:
#   MODEL=meta-llama/Llama-2-7b-hf SEEDS="0 1 2 3 4" \
#     TASKS=arc_easy,arc_challenge,boolq,openbookqa,piqa,social_iqa,hellaswag,winogrande recipes/comoe/table2.sh
# A model of your own is the argument: recipes/comoe/table2.sh MODEL. See run.py for all settings.
# "8 experts" is what is nearest to MixLoRA here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table2}
"${PYTHON:-python}" "$here/run.py" single "$@" <<'ROWS'
LoRA: --peft lora --rank 80
DoRA: --peft dora --rank 80
8 experts: --experts 8 --contrastive 0
CoMoE-LoRA: --experts 4
CoMoE-DoRA: --experts 4 --dora
ROWS
