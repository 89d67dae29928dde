#!/usr/bin/env bash
# CoMoE (Feng et al., 2025), figures 4 to 7: workload and outputs of the experts by task, without and with the loss.
#
# Each row's report, OUT/*-report, has workload.png (figure 4) and scatter.png (figures 5 to 7: one drawing a task).
# As it stands it tunes the demo model on two skills, on a CPU.
# As in the paper, on a GPU of 48 GB, some 4 hours a row:
#   MODEL=meta-llama/Llama-2-7b-hf TASKS=arc_easy,arc_challenge,boolq,openbookqa \
#     recipes/comoe/figures4-7.sh
# A model of your own is the argument: recipes/comoe/figures4-7.sh MODEL. See run.py for all settings.
# PROJECTION is tsne or pca; the paper doesn't name one, nor the layer. The last layer with experts is drawn.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-comoe-figures4-7}
export PROJECTION=${PROJECTION:-tsne}
"${PYTHON:-python}" "$here/run.py" multi "$@" <<'ROWS'
without: --contrastive 0
with: --contrastive 0.01
ROWS
