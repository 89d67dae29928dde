#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, table 3: samples on which experts are compared, without augmentation.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/table3.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/table3.sh MODEL
# Experts are compared on TOKENS of each sample, which bounds the memory: 8 GB for the 2,048 samples of the paper.
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6
source "$(dirname "$0")/settings.sh"
out=$OUT
mkdir -p "$out"
for SAMPLES in ${SIZES:-128 256 512 2048}; do
    OUT=$out/$SAMPLES
    read=(--calibration "$TEXT" --samples "$SAMPLES" --sequence-length "$LENGTH")
    compare "$uniform:mix_tokens=false" --sample-tokens $((SAMPLES * ${TOKENS:-32}))
done
