"""Formats by layer: the choice against brute force, and a checkpoint in several formats as others read it."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compressor.divergence.evaluator import Evaluator
from compressor.pipeline.resolve import open_run, read_calibration
from compressor.progress import SILENT
from compressor.recipe.step import TextOptions
from compressor.steps.quantize.choosing import (
    Sensitivities,
    Unit,
    candidates,
    interpolated,
    probes_of,
    rounding,
    sensitivities,
    units_of,
)
from compressor.steps.quantize.matrices import ALL, find_matrices
from compressor.steps.quantize.scheme import Scheme
from tests.support import small
from tests.support.command_line import Run, refused

FORMATS = [Scheme(name, size) for name, size in (("int2", 64), ("int3", 32), ("int4", 64), ("int8", 64))]


def test_the_choice_is_that_of_all_combinations() -> None:
    draw = torch.Generator().manual_seed(0)
    units = [Unit(f"layers.{number // 2}", ("experts", "dense")[number % 2], ()) for number in range(6)]
    kl = torch.rand(6, 4, generator=draw).sort(descending=True).values.tolist()
    nbytes = [[size * weight for size in (2, 3, 4, 8)] for weight in (5, 7, 1, 9, 4, 6)]
    table = Sensitivities(units, [FORMATS] * 6, kl, nbytes, 0.1, together=False)
    one = Sensitivities(units, [FORMATS] * 6, kl, nbytes, 0.1)
    for limit in (64, 90, 130, 200, 256):
        choices = [choice for choice in product(range(4), repeat=6) if table.total(choice) <= limit]
        best = table.best(limit)
        assert best is not None and table.total(best) <= limit
        joined = [choice for choice in choices if len({*choice[0::2]}) == 1]
        found = one.best(limit)
        assert found is not None and len({*found[0::2]}) == 1
        assert one.predicted(found) == pytest.approx(min(map(one.predicted, joined)), rel=1e-3)
        assert table.predicted(best) == pytest.approx(min(map(table.predicted, choices)), rel=1e-3)
        other = table.best(limit, unlike=best)
        assert other != best
        alike = table.alike(limit)
        assert alike is not None and len({*alike}) == 1
    assert table.best(63) is None and table.alike(63) is None
    assert table.best(-5) is None


def test_a_format_between_two_has_a_kl_between_theirs() -> None:
    known = [(8.0, 2.0), (2.0, 0.1)]  # squared error and KL
    assert interpolated(8.0, known) == pytest.approx(2.0) and interpolated(2.0, known) == pytest.approx(0.1)
    assert 0.1 < interpolated(4.0, known) < 2.0 and interpolated(1.0, known) == pytest.approx(0.05)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "model", hidden_size=64, intermediate_size=64)
    small.text_file(folder)
    return folder


@pytest.mark.usefixtures("offline")
def test_predictions_add_up_to_the_kl_of_all_units_together(home: Path) -> None:
    with open_run(str(home / "model"), device="cpu") as session:
        model = session.model
        asked = TextOptions(data=(str(home / "calibration.txt"),), samples=16, sequence_length=32)
        batches = read_calibration(session, asked, 0).batches
        units = units_of(find_matrices(model, ALL).every)
        schemes = [candidates(unit, ()) for unit in units]
        table = sensitivities(model, units, schemes, batches, torch.float32, SILENT)
        # of the sets of text, every other one
        text = torch.cat([part.batches[0] for part in probes_of(batches, 2 * len(units))[::2]])
        whole = Evaluator.of(model, [text])
        for place, bits in ((0, 2), (next(n for n, own in enumerate(schemes[0]) if own.bits == 4), 4)):
            choice = [place] * len(units)
            assert {scheme.bits for scheme in table.formats(choice).values() if scheme} == {bits}
            (figures,) = whole.measure(model, [rounding(model, table.formats(choice), torch.float32)])
            assert table.predicted(choice) == pytest.approx(figures.means["kl"], rel=1e-3)
    assert 0 < table.relative < 1


@pytest.mark.usefixtures("offline")
def test_layers_in_several_formats_are_loaded_and_pruned_like_others(home: Path, run: Run, tmp_path: Path) -> None:
    out, model = tmp_path / "out", home / "model"
    layers = {
        "model.layers.0": {"experts": "int3/32", "dense": "int8/64"},
        "model.layers.1": {"experts": "int3/32"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model": str(model), "steps": [{"quantize": {"targets": "all", "layers": layers}}]}))
    assert run("compress", recipe, "-o", out).status == 0
    stored = load_file(out / "model.safetensors")
    plain, read = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, out))
    tokens = torch.arange(24).view(2, 12)
    # attention of the second layer is as it was; all else is within half a step of its scale
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(stored[name], plain.get_parameter(name))
    scale = stored["model.layers.0.self_attn.q_proj.weight_scale"].repeat_interleave(64, 1).float()
    weight = plain.get_parameter("model.layers.0.self_attn.q_proj.weight")
    rounded = (weight / scale).round().clamp(-128, 127) * scale
    logits = read(tokens).logits
    plain.get_parameter("model.layers.0.self_attn.q_proj.weight").data = rounded
    assert (plain(tokens).logits - logits).abs().max() > 0
    found = read.model.layers[0].self_attn.q_proj
    assert torch.allclose(found(torch.eye(64)).T, rounded, atol=1e-6)
    assert run("check", out, "--base", model).status == 0
    again = run("compress", out, "-o", tmp_path / "again", "--ratio", 0.5, "--strategy", "aimer", "--correct", "none")
    assert again.status == 0, again.err


@pytest.mark.usefixtures("offline")
def test_bits_are_kept_and_too_few_refused(home: Path, run: Run, tmp_path: Path) -> None:
    text = ("--calibration", home / "calibration.txt", "--samples", 64, "--sequence-length", 32)
    command = ("compress", home / "model", "-o", tmp_path / "out", *text)
    result = run(*command, "--quantize.bits", 3.5)
    assert result.status == 0, result.err
    decision = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]["steps"][0]["plan"]
    assert decision["bits"] <= 3.5 and len(decision["formats"]) == 2
    kls = [choice["kl"] for choice in decision["choices"]]
    assert kls == sorted(kls) and len(kls) >= 2
    command = ("compress", home / "model", "-o", tmp_path / "none", *text)
    refused(run(*command, "--quantize.bits", 1.5), r"1\.5 bits are below the smallest possible, 2\.")
    refused(run(*command, "--quantize.bits", 3, "--quantize", "int8"), "exclude each other")
    refused(run(*command, "--quantize.bits", 3, "--quantize.servers", "vlm"), "did you mean 'vllm'")
