"""A dry run shows the bytes that a run writes, and a run asks for the space that it takes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import compressor
from compressor.api import make_recipe
from compressor.pipeline import run
from compressor.recipe.step import StepOptions
from compressor.steps import workdir
from tests.support import quantized, small, zoo

pytestmark = pytest.mark.usefixtures("offline")

PRUNE = compressor.Prune(strategy="reap", experts=4)
FP8 = {"vocab_size": small.VOCABULARY}


def tokenized(folder: Path, save: Callable[[Path], Any]) -> None:
    save(folder)
    small.tokenizer().save_pretrained(folder)


CASES: dict[str, tuple[Callable[[Path], Any], list[StepOptions]]] = {
    "alone": (lambda folder: small.save(folder, intermediate_size=64), [compressor.Quantize("int4", targets="all")]),
    "fused": (lambda folder: small.save(folder, "gpt_oss", intermediate_size=64), [compressor.Quantize("int3")]),
    "shared": (
        lambda folder: small.save(folder, "ernie4_5_vl_moe", **{"text_config.vocab_size": small.VOCABULARY}),
        [compressor.Quantize("fp8", targets="all")],
    ),
    "pruned": (
        lambda folder: small.save(folder, "deepseek_v3", moe_intermediate_size=32),
        [PRUNE, compressor.Correct("ridge"), compressor.Quantize("mxfp4")],
    ),
    "split": (
        lambda folder: small.save(folder, "qwen3_moe", moe_intermediate_size=64),
        [compressor.Split(2), PRUNE, compressor.Quantize("nvfp4", targets="all")],
    ),
    "dropped": (lambda folder: small.save(folder), [compressor.Quantize("int2"), PRUNE]),
    "of FP8": (
        lambda folder: tokenized(folder, lambda f: quantized.save_fp8(f, sizes=FP8)),
        [compressor.Quantize("int2")],
    ),
}
FAST = {"alone", "pruned"}


@pytest.mark.parametrize("case", [case if case in FAST else zoo.full(case) for case in CASES])
def test_a_dry_run_shows_the_bytes_that_are_written(case: str, tmp_path: Path) -> None:
    save, steps = CASES[case]
    save(tmp_path / "model")
    recipe = make_recipe(str(tmp_path / "model"), steps, str(small.text_file(tmp_path)), 16, 32)
    shown = compressor.dry_run(recipe)
    made = compressor.compress(recipe, tmp_path / "out")
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert shown.after.bytes == made.after.bytes == sum(value.nbytes for file in files for value in file.values())
    assert shown.after.bytes < shown.before.bytes
    experts = sum(value.nbytes for file in files for name, value in file.items() if ".experts." in name)
    assert experts <= shown.after.layer_bytes * shown.moe_layers < 2 * experts  # with routers
    if case != "dropped":  # of which packed numbers are counted as they are stored
        assert shown.after.parameters == made.after.parameters


STAGES: dict[str, list[StepOptions]] = {
    "alone": [compressor.Quantize("int4")],
    "gptq": [compressor.Quantize("int4", method="gptq")],
    "pruned": [PRUNE, compressor.Quantize("int4")],
    "corrected": [PRUNE, compressor.Correct("ridge"), compressor.Quantize("int4", method="gptq")],
}


@pytest.mark.parametrize("case", ["alone", "pruned", zoo.full("gptq"), zoo.full("corrected")])
def test_the_space_that_is_asked_for_is_what_a_run_takes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all files of tensors in the work folder but those of the output, which have a second name, after any write."""
    small.save(tmp_path / "model", intermediate_size=256)
    asked, taken, real = list[int](), list[int](), workdir.LayerWriter.write
    monkeypatch.setattr(run, "check_space", lambda out, nbytes: asked.append(nbytes))

    def measured(self: Any, path: Path, *more: Any) -> None:
        real(self, path, *more)
        with suppress(FileNotFoundError):  # one that is being renamed
            files = [*(tmp_path / ".out.moe-compressor").rglob("*.safetensors*")]
            taken.append(sum(file.stat().st_size for file in files if "output" not in file.parts))

    monkeypatch.setattr(workdir.LayerWriter, "write", measured)
    text = str(small.text_file(tmp_path))
    compressor.compress(
        str(tmp_path / "model"), tmp_path / "out", STAGES[case], calibration=text, samples=16, sequence_length=32
    )
    assert max(taken) * 0.9 < asked[0] < max(taken) * 1.1 + 4096
