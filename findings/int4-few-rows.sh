#!/usr/bin/env bash
# compressed-tensors 0.20 writes asymmetric int4 matrices of at most eight rows that it cannot
# read.
#
# Versions: compressed-tensors 0.19.0 and 0.20.1, torch 2.13.0.
# Guess:    what one release packs it unpacks, whatever the number of rows.
# Seen:     with zero points and two or more groups, matrices of 8 rows or fewer (whose zero points
#           pack into one row of int32) are packed by 0.20.1 and fail to unpack: stride(-1) must be
#           1. 9 rows pass, one group passes, symmetric ones pass, and 0.19.0 reads all of them.
# Where:    no page was found.
# Hurts:    Mixtral's routers (8 experts), gates of shared experts (1 row) and small heads in W4A16
#           with zero points, whose files were right under 0.19.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import sys
import compressed_tensors
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

PACKER = BaseCompressor.get_value_from_registry("pack-quantized")


def error_of_round_trip(rows, groups):
    """The largest error in steps of the grid after packing and unpacking, or the kind of what is raised."""
    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    torch.manual_seed(0)
    weights = torch.randn(rows, groups, 32)
    low = weights.amin(-1)
    scales = (weights.amax(-1) - low) / 15
    zeros = (-8 - torch.round(low / scales)).clamp(-8, 7).to(torch.int8)
    matrix = weights.flatten(1)
    packed = PACKER.compress({"weight": matrix, "weight_scale": scales, "weight_zero_point": zeros}, scheme)
    try:
        back = PACKER.decompress(dict(packed), scheme)["weight"]
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ((back - matrix).reshape(weights.shape) / scales[..., None]).abs().max().item()


found = {}
for rows in (1, 4, 8, 9, 16):
    for groups in (1, 2, 4):
        outcome = error_of_round_trip(rows, groups)
        text = outcome[:80] if isinstance(outcome, str) else f"within {outcome:.2f} steps"
        print(f"compressed-tensors {compressed_tensors.__version__}: {rows} rows of {groups} groups: {text}")
        found[rows, groups] = isinstance(outcome, str) or outcome > 1
bad = {key for key, wrong in found.items() if wrong}
expected = {(rows, groups) for rows in (1, 4, 8) for groups in (2, 4)} if sys.argv[1] == "0.20.1" else set()
sys.exit(0 if bad == expected else f"changed: {bad}")
END

for release in 0.19.0 0.20.1; do
    venv/bin/python -m pip install --quiet torch==2.13.0 compressed-tensors==$release
    venv/bin/python program.py $release
done
