"""The pass of GPTQ over two MoE layers, against Hessians of what the stock model's experts are given."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.quantize.gptq import gptq, inverse_factor
from compressor.steps.quantize.matrices import Matrix, find_matrices
from compressor.steps.quantize.scheme import Scheme, scheme_for
from compressor.steps.quantize.sequential import quantize_sequentially
from compressor.steps.quantize.writing import Writer
from compressor.tensor_cache import load_tensors
from tests.support import opened_models, small, zoo
from tests.support.stock_models import activations

NAMES = ["mixtral", "gpt_oss", zoo.full("nemotron_h"), zoo.full("zaya"), zoo.full("ernie4_5_vl_moe")]


def quantized(model: OpenModel, stock: Any, folder: Path, targets: str = "experts") -> tuple[Scheme, dict[str, Tensor]]:
    """The scheme and what every matrix was rounded to, by module, in one pass over random tokens."""
    matrices = find_matrices(model, targets)
    scheme = scheme_for("int4", 4, [matrix.columns for matrix in matrices.every])
    schemes = {layer: {"experts": scheme, "dense": scheme} for layer in model.architecture.decoder_layers}
    writer = Writer(model, schemes, matrices, folder)
    parts = opened_models.calibration(opened_models.batches(stock, (16, 16, 16, 16), 64))
    quantize_sequentially(writer, parts, Silent(), 0)
    found = dict[str, Tensor]()
    for matrix in matrices.every:
        stored = load_tensors(writer.kept / f"{matrix.decoder_layer}.safetensors")
        own = {
            name: stored[f"{matrix.module}.{name}"]
            for name in scheme.stored(matrix.rows, matrix.columns, torch.float32)
        }
        found[matrix.module] = scheme.unpack(own)
    return scheme, found


def given(stock: Any, layer: str, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] that come to a layer's experts, and whether [T, E] a token is routed to each."""
    experts = stock.get_submodule(layer)
    seen = list[tuple[Tensor, Tensor]]()

    def called(module: Any, args: tuple[Tensor, ...]) -> None:
        hidden, index, weights = args[:3]
        hits = [((index == expert) & (weights != 0)).any(1) for expert in range(module.num_experts)]
        seen.append((hidden.detach(), torch.stack(hits, dim=1)))

    with experts.register_forward_pre_hook(called):
        for batch in batches:
            zoo.logits(stock, batch)
    if not seen:  # of vision's experts, text reaches none
        return torch.zeros(0, stock.config.get_text_config().hidden_size), torch.zeros(0, experts.num_experts).bool()
    return torch.cat([hidden for hidden, _ in seen]), torch.cat([hits for _, hits in seen])


def alike(scheme: Scheme, matrix: Matrix, weight: Tensor, x: Tensor, found: Tensor) -> bool:
    """Whether a matrix was rounded as by GPTQ on inputs [n, I], but for ties and their consequences."""
    scales = scheme.scales(weight[None].contiguous(), torch.float32, clip=True)
    hessian = x.T @ x
    if matrix.part == "down" and len(x) < 3 * matrix.columns:  # no column makes up for another's error
        hessian = torch.eye(matrix.columns)
    codes = gptq(scheme, weight[None].contiguous(), scales, inverse_factor(hessian[None]))
    return float((scheme.values(codes, scales)[0] != found).float().mean()) < 0.02


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_each_matrix_is_rounded_on_what_it_is_given(name: str, tmp_path: Path) -> None:
    """Gate and up on the tokens of their expert, down on what they give it once rounded; each layer after the last."""
    stock, model = opened_models.opened(name, tmp_path / "model")
    scheme, found = quantized(model, stock, tmp_path / "kept")
    every, rest = find_matrices(model, "experts").every, 0
    for layer in model.architecture.layers:
        hidden, hits = given(
            stock, layer.name, opened_models.batches(stock, (16, 16, 16, 16), 64)
        )  # of a model whose earlier layers are rounded
        experts = stock.get_submodule(layer.name)
        own = [matrix for matrix in every if matrix.owner == layer.name]
        for matrix in sorted(own, key=lambda each: each.part == "down"):
            assert matrix.expert is not None
            x = hidden[hits[:, matrix.expert]]
            if matrix.part == "down":
                x = activations(experts, matrix.expert, x)
            rest += len(x)
            assert alike(scheme, matrix, matrix.of(stock), x, found[matrix.module]), matrix.module
            matrix.of(stock).copy_(found[matrix.module])
    assert rest > 1000


@torch.no_grad()
def test_dense_layers_are_rounded_on_what_they_are_given(tmp_path: Path) -> None:
    stock, model = opened_models.opened("mixtral", tmp_path / "model")
    scheme, found = quantized(model, stock, tmp_path / "kept", "all")
    seen = dict[str, list[Tensor]]()
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]

    def note(name: str, module: Any, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).append(args[0].detach().flatten(0, 1))

    for name in names:
        stock.get_submodule(name).register_forward_pre_hook(partial(note, name))
    for batch in opened_models.batches(stock, (16, 16, 16, 16), 64):
        zoo.logits(stock, batch)
    for matrix in find_matrices(model, "all").every:
        if matrix.module in names:
            x = torch.cat(seen[matrix.module])
            assert alike(scheme, matrix, matrix.of(stock), x, found[matrix.module]), matrix.module


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    stock = zoo.save("mixtral", tmp_path)
    small.edit_tensors(tmp_path, lambda tensors: tensors["model.layers.1.post_attention_layernorm.weight"].fill_(1e30))
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    sentence = r"layers.1\..*: its inputs are not finite on the calibration text; try --dtype float32"
    with pytest.raises(CompressionError, match=sentence):
        quantized(model, stock, tmp_path / "kept")


@torch.no_grad()
def test_experts_with_little_text_are_named_and_kept_layers_of_other_formats_are_made_again(tmp_path: Path) -> None:
    """Down is rounded to nearest with fewer than three tokens for each of its columns."""
    stock, model = opened_models.opened("mixtral", tmp_path / "model")
    matrices = find_matrices(model, "experts")
    batches = opened_models.batches(stock, (4, 4), 32)
    text, (first, second) = opened_models.calibration(batches), model.architecture.decoder_layers[:2]
    layer = model.architecture.layers[0]
    _, hits = given(stock, layer.name, batches)
    columns = next(matrix.columns for matrix in matrices.every if matrix.part == "down")
    few = [expert for expert, count in enumerate(hits.sum(0).tolist()) if count < 3 * columns]
    schemes = {first: {"experts": Scheme("int3", 8)}, second: {"experts": Scheme("int2", 8)}}
    writer = Writer(model, schemes, matrices, tmp_path / "kept")
    named = quantize_sequentially(writer, text, Silent(), 0)
    assert few and named[first] == few
    scheme = schemes[first]["experts"]
    stored = load_tensors(tmp_path / "kept" / f"{first}.safetensors")
    for matrix in matrices.of(first):
        if matrix.part == "down" and matrix.expert in few:
            weight = matrix.of(stock)[None].contiguous()
            scales = scheme.scales(weight, torch.float32, clip=True)
            names = scheme.stored(matrix.rows, matrix.columns, torch.float32)
            value = scheme.unpack({name: stored[f"{matrix.module}.{name}"] for name in names})
            assert torch.equal(value, scheme.values(scheme.codes(weight, scales), scales)[0])
    times = [(tmp_path / "kept" / f"{name}.safetensors").stat().st_mtime_ns for name in (first, second)]
    other = Writer(model, {**schemes, second: {"experts": Scheme("int4", 8)}}, matrices, tmp_path / "kept")
    assert quantize_sequentially(other, text, Silent(), 0)[first] == few
    later = [(tmp_path / "kept" / f"{name}.safetensors").stat().st_mtime_ns for name in (first, second)]
    assert later[0] == times[0] and later[1] > times[1]
