#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, figure 5: Qwen2-57B-A14B from 64 experts to 48, by three strategies.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/figure5.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/figure5.sh MODEL
# OUT/comparison.png draws scores over the number of experts.
paper_model=Qwen/Qwen2-57B-A14B
paper_experts=62,60,58,56,54,52,50,48
source "$(dirname "$0")/settings.sh"
compare "$count,$surrogate,$uniform"
