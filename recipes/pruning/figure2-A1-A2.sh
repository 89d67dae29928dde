#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, figures 2, A1 and A2: similarity of the experts in every layer.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/figure2-A1-A2.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/figure2-A1-A2.sh MODEL
# Figure A2: PAPER=yes recipes/pruning/figure2-A1-A2.sh mistralai/Mixtral-8x22B-v0.1
# OUT.html is a page, OUT/linear-cka.png and OUT/rbf-cka.png have the maps. The paper reads 32 samples.
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6
source "$(dirname "$0")/settings.sh"
moe-compress report "$MODEL" --experts "${EXPERTS%%,*}" "${read[@]}" -o "$OUT.html" --figures "$OUT"
