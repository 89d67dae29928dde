#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, figure 6: routed tokens of all experts before pruning and after, by two strategies.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/figure6.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/figure6.sh MODEL
# OUT/STRATEGY-figures/visits.png has both for each layer, OUT/STRATEGY.html the numbers.
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6
source "$(dirname "$0")/settings.sh"
mkdir -p "$OUT"
for strategy in count-guided data-centric; do
    moe-compress compress "$MODEL" -o "$OUT/$strategy" --experts "${EXPERTS%%,*}" --strategy "$strategy" \
        --correct none "${read[@]}"
    moe-compress report "$OUT/$strategy" -o "$OUT/$strategy.html" --figures "$OUT/$strategy-figures"
done
