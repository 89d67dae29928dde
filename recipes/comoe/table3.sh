#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), table 3: experts in the lower, middle or upper third of the decoder layers.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 3 hours a row and seed:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa SEEDS="0 1 2 3 4" \
#     recipes/comoe/table3.sh
# A model of your own is the argument: recipes/comoe/table3.sh MODEL. See run.py for all settings.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-table3}
"${PYTHON:-python}" "$here/run.py" multi "$@" <<'ROWS'
low: --layers low
high: --layers high
middle: --layers middle
low and high: --layers low,high
ROWS
