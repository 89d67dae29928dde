"""Bits by layer for llama.cpp: a command of `llama-quantize` with a type for each tensor.

Each `--tensor-type PATTERN=TYPE` has a regular expression, put into lower case and searched for in
tensors' names; the first one found decides. Norms and routers stay as they are in any case."""

import math
from collections import Counter
from collections.abc import Mapping

from compressor.model.moe_layer import layer_number
from compressor.model.opened import OpenModel
from compressor.steps.quantize.matrices import ALL, find_matrices
from compressor.steps.quantize.options import FORMATS

TYPES = {2: "q2_k", 3: "q3_k", 4: "q4_k", 8: "q8_0"}  # by bits
SUPERBLOCK = 256  # columns under one scale of a K-quant, which must divide the rows
BLOCK = 32  # of all other types here
# In place of a K-quant: 4.5 bits, the fewest in blocks of 32. llama.cpp itself falls back to Q4_0,
# as large and less exact, or for Q4_K to Q5_0.
SHORT_ROWS = "iq4_nl"
PLAIN = "bf16"
# unit, and the names of its tensors within a block, in the order in which patterns are tried
KINDS = {
    "down": ("experts", r"ffn_down_exps\."),
    "in": ("experts", r"ffn_(gate|up|gate_up)_exps\."),
    "dense": ("dense", ""),
}
NAME = "llama-quantize.txt"  # of the file in the output
NOTE = """\
# The number formats of this model, for llama.cpp. Rounding twice costs quality, so convert what a
# run without `quantize` writes:
#   python convert_hf_to_gguf.py CHECKPOINT --outtype bf16 --outfile model-bf16.gguf
#   llama-imatrix -m model-bf16.gguf -f text.txt -o imatrix.gguf
"""


def type_of(bits: int, columns: int) -> str:
    """Return llama.cpp's type for matrices of so many bits and columns."""
    if columns % BLOCK:
        return PLAIN
    return SHORT_ROWS if bits < 8 and columns % SUPERBLOCK else TYPES[bits]


def quantize_command(layers: Mapping[str, Mapping[str, str]], model: OpenModel) -> str:
    """Return the content of `NAME`: the command for schemes by decoder layer, then by "experts" or
    "dense", as a decision of `quantize` has them: `{"model.layers.0": {"experts": "int3/64"}}`.

    Everything without a scheme stays in bfloat16."""
    columns = dict[tuple[str, str], int]()
    weights = Counter[tuple[str, str]]()
    for matrix in find_matrices(model, ALL).every:
        kind = {"": "dense", "down": "down"}.get(matrix.part, "in")
        place = kind, matrix.decoder_layer
        columns[place] = math.gcd(columns.get(place, 0), matrix.columns)
        weights[place] += matrix.rows * matrix.columns
    blocks = dict[tuple[str, str], list[str]]()
    sizes = Counter({"q8_0": 0})
    for kind, (unit, _) in KINDS.items():
        for layer, schemes in layers.items():
            if unit in schemes and (kind, layer) in columns:
                bits = FORMATS[schemes[unit].partition("/")[0]].bits
                chosen = type_of(bits, columns[kind, layer])
                blocks.setdefault((kind, chosen), []).append(str(layer_number(layer)))
                sizes[chosen] += weights[kind, layer]
    arguments = []
    for (kind, chosen), numbers in blocks.items():
        pattern = rf"blk\.({'|'.join(numbers)})\.{KINDS[kind][1]}"
        arguments.append(f"--tensor-type '{pattern}={chosen}'")
    # patterns count only beside a type that is quantised
    del sizes[PLAIN]
    commonest = sizes.most_common(1)[0][0].upper()
    lines = [
        "llama-quantize --imatrix imatrix.gguf",
        *arguments,
        f"--tensor-type '.={PLAIN}'",
        f"model-bf16.gguf model-quantized.gguf {commonest}",
    ]
    return NOTE + " \\\n    ".join(lines) + "\n"
