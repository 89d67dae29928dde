"""Rounding and packing against compressed-tensors' own, against brute force, and what is refused."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES
from compressor.errors import CompressionError
from compressor.steps.quantize.scheme import ROW, Scales, Scheme, scheme_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for number, matrix in enumerate(weight):
        groups, overall = parts(scales, number)
        state = {"weight": matrix, "weight_scale": groups}
        wanted = fake_quantize(matrix, groups, None, scheme.described.weights, overall)
        if scheme.name in ("mxfp4", "nvfp4"):
            wanted = wanted.bfloat16()  # the dtype that it loads them in
        if overall is not None:
            state["weight_global_scale"] = overall
        assert torch.equal(values[number], wanted.to(dtype))
        stored = {part: value[number] for part, value in packed.items()}
        theirs = compressor.compress(state, scheme.described)
        if name not in ("mxfp4", "nvfp4"):
            theirs["weight_scale"] = theirs["weight_scale"].to(dtype)
        assert stored.keys() == theirs.keys()
        for part, value in stored.items():
            assert value.dtype == theirs[part].dtype and value.shape == theirs[part].shape
            assert value.contiguous().view(-1).view(torch.uint8).tolist() == (
                theirs[part].contiguous().view(-1).view(torch.uint8).tolist()
            ), part
        unpacked = scheme.unpack(stored)
        assert torch.equal(unpacked.to(dtype), values[number])
        assert torch.equal(compressor.decompress(stored, scheme.described)["weight"].to(dtype), values[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size", "width"), SCHEMES)
def test_what_is_stored_has_the_stated_dtypes_shapes_and_bytes(
    name: str, size: int, width: int, dtype: torch.dtype
) -> None:
    scheme, weight = Scheme(name, size), matrices(width, dtype)
    scales = scheme.scales(weight, dtype)
    packed = scheme.pack(scheme.codes(weight, scales), scales, dtype)
    own = {part: value[0].contiguous() for part, value in packed.items()}
    found = {part: (DTYPE_NAMES[value.dtype], tuple(value.shape)) for part, value in own.items()}
    assert found == scheme.stored(7, width, dtype)
    assert scheme.nbytes(7, width, dtype) == sum(value.nbytes for value in own.values())
    weights = {part: value for part, value in own.items() if part not in ("weight_shape", "weight_global_scale")}
    rest = {"int8": 4, "int4": 4, "int3": 4, "int2": 4}.get(name, 0) * 7  # bytes of a word of each row, partly used
    groups = 1 if scheme.group_size == ROW else width // scheme.group_size
    scale = 1 if name in ("mxfp4", "nvfp4") else dtype.itemsize
    least = 7 * (width * scheme.bits / 8 + groups * scale)
    assert least <= sum(value.nbytes for value in weights.values()) < least + rest + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size", "width"), SCHEMES)
def test_no_representable_number_is_nearer(name: str, size: int, width: int, dtype: torch.dtype) -> None:
    scheme, weight = Scheme(name, size), matrices(width, dtype)
    scales = scheme.scales(weight, dtype)
    codes = scheme.codes(weight, scales)
    if name == "fp8":
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        table = table[table.isfinite()]
    elif name in ("mxfp4", "nvfp4"):
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)]).double()
    else:
        table = torch.arange(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1)).double()
    scaled = (per_group(weight, size).double() / scales.effective[..., None].double()).flatten(-2)
    least = (scaled[..., None] - table).abs().amin(-1)
    assert torch.isin(codes.double(), table).all()
    assert ((scaled - codes.double()).abs() <= least + 1e-5).all()  # ties in float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size", "width"), SCHEMES)
def test_scales_span_each_group(name: str, size: int, width: int, dtype: torch.dtype) -> None:
    """Of integers and FP8 the largest weight is the largest number, of MXFP4 the scale is a power of 2."""
    scheme, weight = Scheme(name, size), matrices(width, dtype)
    effective, largest = scheme.scales(weight, dtype).effective, per_group(weight, size).abs().amax(-1)
    assert effective.shape == largest.shape and bool((effective > 0).all())
    full = {"fp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}.get(name, (2**scheme.bits - 1) / 2)
    ratio = (largest / effective)[largest > 0] / full
    if name == "mxfp4":
        exponent = effective.log2()
        assert torch.equal(exponent, exponent.round())
        assert bool((ratio > 0.5).all()) and bool((ratio < 7 / 6).all())
    else:
        room = {"nvfp4": 1 / 16}.get(name, {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype])
        tiny = largest[largest > 0] < 1e-4  # whose scales are subnormal in float16
        assert bool(((ratio - 1).abs() <= room * 1.001)[~tiny].all())


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


def test_nvfp4_takes_one_global_scale_for_matrices_that_are_fused() -> None:
    scheme, weight = scheme_for("nvfp4", None, [32]), matrices(32, torch.float32)[[0, 3]]
    own = weight.abs().amax((1, 2))
    shared = scheme.scales(weight, torch.float32, largest=own.max().expand(2))
    assert shared.overall is not None and shared.overall.flatten().tolist() == [float(448 * 6 / own.max())] * 2
    codes = scheme.codes(weight, shared)
    packed = scheme.pack(codes, shared, torch.float32)
    assert packed["weight_global_scale"].shape == (2, 1) and packed["weight_scale"].float().amax() <= 448
    error = (scheme.values(codes, shared) - weight).abs().amax((1, 2)) / own
    assert float(error.max()) < 1 / 6


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


@pytest.mark.parametrize(
    ("name", "size", "columns", "sentence"),
    [
        (
            "int4",
            128,
            [64, 192],
            "groups of 128 do not divide matrices of 64, 192 columns; give group_size 64 or 32 or 16 or 8 or -1",
        ),
        ("int4", 32, [48, 64], "groups of 32 do not divide matrices of 48, 64 columns; give group_size 16 or 8 or -1"),
        ("int3", 8, [20], "groups of 8 do not divide matrices of 20 columns; give group_size -1"),
        ("mxfp4", None, [48], "groups of 32 do not divide matrices of 48 columns; choose int4 or fp8"),
        ("nvfp4", None, [24, 64], "groups of 16 do not divide matrices of 24, 64 columns; choose int4 or fp8"),
        ("mxfp4", 16, [64], "mxfp4 has groups of 32; leave group_size out"),
        ("nvfp4", ROW, [64], "nvfp4 has groups of 16; leave group_size out"),
        ("fp8", 128, [128], "fp8 has one scale a row .-1.; leave group_size out"),
    ],
)
def test_what_cannot_be_is_refused(name: str, size: int | None, columns: list[int], sentence: str) -> None:
    with pytest.raises(CompressionError, match=f"^quantize: {sentence}$"):
        scheme_for(name, size, columns)
