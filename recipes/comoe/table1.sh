#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 1: each task tuned on its own, and all of them by one set of adapters.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 4 hours a row and seed:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa,piqa SEEDS="0 1 2 3 4" \
#     recipes/comoe/table1.sh
# A model of your own is the argument: recipes/comoe/table1.sh MODEL. See run.py for all settings.
# MOELoRA, MiLoRA and OMoE are other papers' methods and are left out. "8 experts" is what is nearest to MixLoRA here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table1}
"${PYTHON:-python}" "$here/run.py" both "$@" <<'ROWS'
LoRA: --peft lora --rank 80
DoRA: --peft dora --rank 80
8 experts: --experts 8 --contrastive 0
CoMoE-LoRA: --experts 4
ROWS
