#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 7: another base model.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 2 hours a row and seed:
#   MODEL=google/gemma-2b TASKS=arc_easy,arc_challenge,boolq,openbookqa SEEDS="0 1 2 3 4" \
#     recipes/comoe/table7.sh
# A model of your own is the argument: recipes/comoe/table7.sh MODEL. See run.py for all settings.
# "8 experts" is what is nearest to MixLoRA here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table7}
"${PYTHON:-python}" "$here/run.py" multi "$@" <<'ROWS'
8 experts: --experts 8 --contrastive 0
CoMoE-LoRA: --experts 4
ROWS
