#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, table 1: five ways to prune Mixtral-8x7B to 6 and 4 experts.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/table1.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/table1.sh MODEL
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6,4
source "$(dirname "$0")/settings.sh"
compare "$router,$count,$enumerate,$vectorized,$learn"
