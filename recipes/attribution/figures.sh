#!/usr/bin/env bash
# "Understanding Cross-Layer Contributions to MoE Routing in LLMs" (ICLR 2026): all heat maps and the causal figure.
#
# Needs: as it stands the demo model, offline, a CPU and a minute. As in the paper: PAPER=yes recipes/attribution/figures.sh
# with OLMoE and C4 from the Hub (32 sequences of 512 tokens; minutes on a GPU, an hour or more on a CPU), and then the
# other models as the argument: deepseek-ai/DeepSeek-V2-Lite, Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-v0.1.
# OUT/influence.png: variance by component, sending layer and receiving router. OUT/scores.png: APS and ANS.
# OUT/experts.png: the strongest experts and heads. OUT/causal.png: AARV over variance. OUT/graph.png: who steers whom.
source "$(dirname "$0")/settings.sh"
attribute "$OUT" --keys "${KEYS:-2}" "${@:2}"
