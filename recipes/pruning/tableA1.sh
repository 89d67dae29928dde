#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, table A1: weights vectorized and surrogate, groups by data merged by Learn and Max.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/tableA1.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/tableA1.sh MODEL
# The lower half of the table: PAPER=yes recipes/pruning/tableA1.sh mistralai/Mixtral-8x22B-v0.1
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6,4
source "$(dirname "$0")/settings.sh"
compare "$vectorized,$surrogate,$learn,$max"
