#!/usr/bin/env bash
# In torch each FP8 dtype treats numbers that are too large in its own way: the largest value,
# infinity, or NaN.
#
# Versions: torch 2.13.0, CPU.
# Guess:    a cast beyond the range does the same for all kinds, and infinity never becomes finite.
# Seen:     float8_e4m3fn saturates, infinities included (inf becomes 448); float8_e5m2 gives
#           infinity; the fnuz kinds, which AMD's older accelerators use, give NaN. From float32,
#           float16 and bfloat16 alike.
# Where:    no page was found on casts beyond the range.
# Hurts:    who quantises without clamping and tests by isfinite: with e4m3fn an overflow or an
#           infinite weight passes, with fnuz the same code gives NaN on another device.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 numpy==2.4.6

venv/bin/python - <<'END'
import math
import sys
import torch


def kind(value, largest):
    if math.isnan(value):
        return "nan"
    return "inf" if math.isinf(value) else "largest" if value == largest else str(value)


found = {}
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max
    for source in (torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.tensor([min(2 * largest, 65504), math.inf]).to(source)
        found[name, source] = tuple(kind(value, largest) for value in numbers.to(dtype).float().tolist())
        print(f"torch {torch.__version__}, {source} to {name}: {numbers.tolist()} become {found[name, source]}")
meant = {"float8_e4m3fn": "largest", "float8_e5m2": "inf", "float8_e4m3fnuz": "nan", "float8_e5m2fnuz": "nan"}
sys.exit(0 if all(seen == (meant[name],) * 2 for (name, _), seen in found.items()) else "changed")
END
