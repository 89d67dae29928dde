"""Rounding and packing against compressed-tensors' own, against brute force, and what is refused."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES
from compressor.errors import CompressionError
from compressor.steps.quantize.options import ROW
from compressor.steps.quantize.scheme import Scales, Scheme, scheme_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = [
    *((name, ROW, width) for name in ("fp8", "int8", "int4", "int3", "int2") for width in (37, 64)),
    *((name, size, 96) for name in ("int8", "int4", "int3", "int2") for size in (8, 32)),
    *(("int4", 128, 256), ("int3", 96, 96), ("mxfp4", 32, 96), ("nvfp4", 16, 48)),
]


def matrices(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Four matrices [4, 7, I] in float32 that a dtype holds exactly: plain, tiny, partly zero, and one of outliers."""
    weight = 0.1 * torch.randn(4, 7, width, generator=torch.Generator().manual_seed(seed))
    weight[1] *= 1e-4
    weight[2, :, : width // 2] = 0
    weight[2, 3] = 0
    weight[3, :, ::5] *= 40
    return weight.to(dtype).float() + 0  # no zero is negative


def rounded(scheme: Scheme, weight: Tensor, scales: Scales) -> Tensor:
    return scheme.values(scheme.codes(weight, scales), scales)


def per_group(value: Tensor, size: int) -> Tensor:
    return value.unflatten(-1, (-1, value.shape[-1] if size == ROW else size))


def parts(scales: Scales, number: int) -> tuple[Tensor, Tensor | None]:
    """Scales [O, n] and the global scale [1] of a matrix, as compressed-tensors takes them."""
    return scales.groups[number], None if scales.overall is None else scales.overall[number].flatten()


def raw(value: Tensor) -> list[int]:
    content: list[int] = value.contiguous().view(-1).view(torch.uint8).tolist()
    return content


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size", "width"), SCHEMES)
@pytest.mark.parametrize("clip", [False, True])
def test_values_and_packing_are_those_of_compressed_tensors(
    name: str, size: int, width: int, dtype: torch.dtype, clip: bool
) -> None:
    scheme, weight = Scheme(name, size), matrices(width, dtype)
    scales = scheme.scales(weight, dtype, clip)
    codes = scheme.codes(weight, scales)
    values, packed = scheme.values(codes, scales).to(dtype), scheme.pack(codes, scales, dtype)
    is_fp4 = name in ("mxfp4", "nvfp4")
    library = BaseCompressor.get_value_from_registry(scheme.format)
    for number, matrix in enumerate(weight):
        groups, overall = parts(scales, number)
        wanted = fake_quantize(matrix, groups, None, scheme.described.weights, overall)
        wanted = wanted.bfloat16() if is_fp4 else wanted  # the dtype that it loads them in
        assert torch.equal(values[number], wanted.to(dtype))
        state = {"weight": matrix, "weight_scale": groups}
        if overall is not None:
            state["weight_global_scale"] = overall
        theirs = library.compress(state, scheme.described)
        if not is_fp4:
            theirs["weight_scale"] = theirs["weight_scale"].to(dtype)
        stored = {part: value[number] for part, value in packed.items()}
        assert {part: (value.dtype, value.shape, raw(value)) for part, value in stored.items()} == {
            part: (value.dtype, value.shape, raw(value)) for part, value in theirs.items()
        }
        shapes = {part: (DTYPE_NAMES[value.dtype], tuple(value.shape)) for part, value in stored.items()}
        assert shapes == scheme.stored(7, width, dtype)
        assert scheme.nbytes(7, width, dtype) == sum(value.nbytes for value in stored.values())
        assert torch.equal(scheme.unpack(stored).to(dtype), values[number])
        assert torch.equal(library.decompress(stored, scheme.described)["weight"].to(dtype), values[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size", "width"), SCHEMES)
def test_clip_search_never_has_a_larger_error(name: str, size: int, width: int, dtype: torch.dtype) -> None:
    scheme, weight = Scheme(name, size), matrices(width, dtype)

    def error(clip: bool) -> Tensor:
        scales = scheme.scales(weight, dtype, clip)
        codes, grouped = per_group(scheme.codes(weight, scales), size).double(), per_group(weight, size).double()
        return ((codes * scales.effective[..., None].double() - grouped).abs() ** 2.5).sum(-1)

    before, after = error(False), error(True)
    assert bool((after <= before * (1 + 1e-5)).all())
    if name in ("int4", "int3", "int2"):
        assert float(after.sum()) < 0.999 * float(before.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "nvfp4"])
def test_each_matrix_is_rounded_as_if_it_were_alone(name: str, dtype: torch.dtype) -> None:
    scheme, weight = scheme_for(name, None, [96]), matrices(96, dtype)
    together = rounded(scheme, weight, scheme.scales(weight, dtype, True))
    alone = [rounded(scheme, one[None], scheme.scales(one[None], dtype, True))[0] for one in weight]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "int3", "int2", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(name: str, dtype: torch.dtype) -> None:
    scheme, weight = scheme_for(name, None, [64]), torch.zeros(1, 3, 64)
    scales = scheme.scales(weight, dtype, True)
    codes = scheme.codes(weight, scales)
    stored = {part: value[0] for part, value in scheme.pack(codes, scales, dtype).items()}
    assert not scheme.values(codes, scales).any() and not scheme.unpack(stored).any()


def test_scales_that_are_subnormal_in_float16_are_kept() -> None:
    weight, scheme = 2e-5 * torch.randn(1, 8, 64).clamp(-2.5, 2.5), scheme_for("int4", None, [64])
    found = rounded(scheme, weight, scheme.scales(weight, torch.float16))
    assert float((found - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize(
    ("name", "size", "columns", "wanted"),
    [
        ("int4", None, [256, 1024], 128),
        ("int4", None, [256, 192], 64),
        ("int4", None, [96, 64], 32),
        ("int4", None, [48, 64], ROW),
        ("int4", 16, [48, 64], 16),
        ("int2", ROW, [48], ROW),
        ("fp8", None, [37], ROW),
        ("fp8", ROW, [37], ROW),
        ("mxfp4", None, [64], 32),
        ("nvfp4", 16, [48], 16),
    ],
)
def test_group_sizes(name: str, size: int | None, columns: list[int], wanted: int) -> None:
    assert scheme_for(name, size, columns) == Scheme(name, wanted)


DIVIDE = "groups of {} do not divide matrices of {} columns; "


@pytest.mark.parametrize(
    ("name", "size", "columns", "sentence"),
    [
        ("int4", 128, [64, 192], DIVIDE.format(128, "64, 192") + "give group_size 64 or 32 or 16 or 8 or -1"),
        ("int4", 32, [48, 64], DIVIDE.format(32, "48, 64") + "give group_size 16 or 8 or -1"),
        ("int3", 8, [20], DIVIDE.format(8, 20) + "give group_size -1"),
        ("mxfp4", None, [48], DIVIDE.format(32, 48) + "choose int4 or fp8"),
        ("nvfp4", None, [24, 64], DIVIDE.format(16, "24, 64") + "choose int4 or fp8"),
        ("mxfp4", 16, [64], "mxfp4 has groups of 32; leave group_size out"),
        ("nvfp4", ROW, [64], "nvfp4 has groups of 16; leave group_size out"),
        ("fp8", 128, [128], "fp8 has one scale a row .-1.; leave group_size out"),
    ],
)
def test_what_cannot_be_is_refused(name: str, size: int | None, columns: list[int], sentence: str) -> None:
    with pytest.raises(CompressionError, match=f"^quantize: {sentence}$"):
        scheme_for(name, size, columns)
