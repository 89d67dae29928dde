#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 6: 4 to 8 experts, one set of adapters for all tasks.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 4 hours a row and seed:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa SEEDS="0 1 2 3 4" \
#     recipes/comoe/table6.sh
# A model of your own is the argument: recipes/comoe/table6.sh MODEL. See run.py for all settings.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table6}
"${PYTHON:-python}" "$here/run.py" multi "$@" <<'ROWS'
n = 4: --experts 4
n = 5: --experts 5
n = 6: --experts 6
n = 7: --experts 7
n = 8: --experts 8
ROWS
