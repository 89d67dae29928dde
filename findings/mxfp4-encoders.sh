#!/usr/bin/env bash
# "MXFP4" weights of two encoders differ: the shared exponent of a block is chosen in two ways,
# ties in two more.
#
# Versions: gguf 0.19.0, torchao 0.18.0, compressed-tensors 0.20.1, torch 2.13.0.
# Guess:    MXFP4 is a standard of the OCP, so that any two encoders give the same bytes for the
#           same weights.
# Seen:     a block whose largest value is 7 gets the exponent 0 of gguf and torchao, and 7 becomes
#           6, the largest code; of compressed-tensors 1, and 7 becomes 8. gguf rounds 3.5 to 3,
#           torchao to 4. All are valid files.
# Where:    torchao lists four ways to choose the exponent, of which this is its default; the others
#           name none.
# Hurts:    who compares qualities of "MXFP4" across exporters, or hashes weights to tell whether
#           two files agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 torchao==0.18.0 \
    compressed-tensors==0.20.1

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import sys
import gguf
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from torchao.prototype.mx_formats.mx_tensor import MXTensor

block = torch.zeros(1, 32)
block[0, :5] = torch.tensor([7.0, 5.0, 3.5, 2.5, 1.0])


def by_gguf():
    kind = gguf.GGMLQuantizationType.MXFP4
    return gguf.quants.dequantize(gguf.quants.quantize(block.numpy(), kind), kind)[0, :5].tolist()


def by_torchao():
    return MXTensor.to_mx(block, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32)[0, :5].tolist()


def by_compressed_tensors():
    arguments = preset_name_to_scheme("MXFP4", ["Linear"]).weights
    low, high = block.amin(-1, keepdim=True), block.amax(-1, keepdim=True)
    scale, zero = calculate_qparams(low, high, arguments)
    return fake_quantize(block, scale, zero, arguments)[0, :5].tolist()


found = {"gguf": by_gguf(), "torchao": by_torchao(), "compressed-tensors": by_compressed_tensors()}
print(f"a block that begins with {block[0, :5].tolist()} and ends in zeros becomes")
for name, values in found.items():
    print(f"{name}: {values}")
expected = {"gguf": [6.0, 4.0, 3.0, 2.0, 1.0], "torchao": [6.0, 4.0, 4.0, 2.0, 1.0],
            "compressed-tensors": [8.0, 4.0, 4.0, 2.0, 1.0]}
sys.exit(0 if found == expected else "changed")
END
