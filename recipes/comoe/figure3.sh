#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), figure 3: the weight of the contrastive loss, on one task and on several.
#
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 5 hours a row and seed:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa SEEDS="0 1 2 3 4" \
#     recipes/comoe/figure3.sh
# A model of your own is the argument: recipes/comoe/figure3.sh MODEL. See run.py for all settings.
# Figure 3(a) is the column of BoolQ in the rows "single"; chart.png draws the means.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-figure3}
export CHART=yes
"${PYTHON:-python}" "$here/run.py" both "$@" <<'ROWS'
0: --contrastive 0
0.001: --contrastive 0.001
0.01: --contrastive 0.01
0.1: --contrastive 0.1
1: --contrastive 1
ROWS
