import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, kl_div

import compressor
from compressor.checkpoint.source import locate
from compressor.model.opened import load_whole, open_model
from compressor.progress import Silent
from compressor.recipe.recipe import default_steps, make_step
from compressor.recipe.step import TextOptions
from compressor.report.comparison_report import Comparison
from compressor.report.comparison_rows import Row
from compressor.report.sizes import PlannedShare, plan_shares
from compressor.steps.job import untouched
from tests.support import small, zoo
from tests.support.quantized import save_fp8

LENGTH = 32
SIZES: dict[str, Any] = {"samples": 24, "sequence_length": LENGTH}
OPTIONS: dict[str, Any] = {"strategy": "count-guided", "correct": "ridge"}
GRID: dict[str, Any] = {"strategies": ["count-guided"], "corrections": ["ridge"]}
OTHERS = ("qwen3_moe", "deepseek_v3", "fp8")
SCHEMES = ("none", "fp8", "int4", "int3", "mxfp4", "nvfp4")

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose matrices have 64 columns, and texts to calibrate and to evaluate on."""
    folder = tmp_path_factory.mktemp("home")
    model = zoo.build("mixtral", vocab_size=small.VOCABULARY, hidden_size=64, intermediate_size=64)
    model.bfloat16().save_pretrained(folder / "model")
    small.tokenizer().save_pretrained(folder / "model")
    for name, number in (("fit", 60), ("held", 40)):
        lines = (json.dumps({"text": f"{name} {n}: {n * n} foxes jump {n * 37} times."}) for n in range(number))
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def text(home: Path) -> Any:
    return TextOptions(data=(str(home / "fit.jsonl"),), **SIZES)


def compared(home: Path, **more: Any) -> Comparison:
    settings = {"shares": (1, Fraction(1, 2)), "schemes": SCHEMES, "dtype": "float32", **GRID, **more}
    return compressor.compare(home / "model", evaluate=[str(home / "held.jsonl")], calibration=text(home), **settings)


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=rows).logits[:, :-1]
    return found.double().flatten(0, 1)


def pick(made: Comparison, share: float, scheme: str) -> Row:
    (found,) = [pair for pair in made.rows if (pair.variant.share, pair.variant.scheme) == (share, scheme)]
    return found


def stored_bytes(folder: Path) -> int:
    return sum(value.nbytes for file in folder.glob("*.safetensors") for value in load_file(file).values())


def evaluated(home: Path) -> torch.Tensor:
    """The rows that a comparison evaluates on, read by the same reader."""
    from compressor.data.batches import evaluation_sets

    name = str(home / "held.jsonl")
    (own,) = evaluation_sets([name], small.tokenizer(), length=LENGTH, seed=0, vocab=small.VOCABULARY, most=64)
    return torch.cat(own.batches)


@pytest.mark.full
@pytest.mark.parametrize("split", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_pair_is_what_compress_writes(home: Path, tmp_path: Path, split: int) -> None:
    made, rows = compared(home, splits=[split]), evaluated(home)
    base = logits(load_whole(home / "model", dtype=torch.float32), rows)
    for share, scheme in ((0.5, "none"), (0.5, "int4"), (0.5, "int3"), (0.5, "nvfp4"), (1.0, "mxfp4"), (1.0, "fp8")):
        steps = [*default_steps(**OPTIONS, split=split, ratio=0.5)] if share < 1 else []
        steps += [] if scheme == "none" else [make_step("quantize", {"scheme": scheme})]
        out = tmp_path / f"{share}-{scheme}"
        compressor.compress(home / "model", out, steps, calibration=text(home), dtype="float32")
        found, pair = logits(load_whole(out, dtype=torch.float32), rows), pick(made, share, scheme)
        kl = float(kl_div(found.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="batchmean"))
        assert pair.kl == pytest.approx(kl, rel=1e-5)
        assert pair.loss == pytest.approx(float(cross_entropy(found, rows[:, 1:].flatten())), rel=1e-6)
        assert pair.variant.bytes == sum(
            value.nbytes for file in out.glob("*.safetensors") for value in load_file(file).values()
        )
        assert pair.variant.split == (split if share < 1 else 1)
    assert (made.base.variant.bytes, made.base.kl, made.increase(made.base)) == (stored_bytes(home / "model"), 0, 0)
    assert made.bits(made.base) == 16


@pytest.mark.parametrize("name", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_bytes_are_those_that_are_written(name: str, tmp_path: Path) -> None:
    """Experts stored one by one, fused and transposed with biases, and quantised; of half the experts and of all."""
    source = tmp_path / "in"
    save_fp8(source) if name == "fp8" else zoo.build(name).save_pretrained(source)
    steps = default_steps(strategy="aimer", correct="none", split=1)
    shares, model = [Fraction(1), Fraction(1, 2)], open_model(locate(str(source)))
    smaller, left_out = plan_shares(model, steps, None, Silent(), 0, shares, tmp_path)  # type: ignore[arg-type]
    assert left_out == []
    planned = [PlannedShare(Fraction(1), model, untouched(model)), *smaller]
    for kept in planned:
        variants, _ = kept.variants(["none", "int8", "int3", "fp8"], [])
        for variant, _ in variants:
            scheme, nbytes = variant.scheme, variant.bytes
            wanted = [*default_steps(strategy="aimer", correct="none", split=1, ratio=0.5)] if kept.share < 1 else []
            wanted += [] if scheme == "none" else [make_step("quantize", {"scheme": scheme})]
            out = tmp_path / f"{kept.share.denominator}-{scheme}"
            if wanted:
                compressor.compress(source, out, wanted)
            assert nbytes == stored_bytes(out if wanted else source)
