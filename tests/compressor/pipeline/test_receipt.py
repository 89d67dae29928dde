"""receipt.json: a script without this package comes to its figures, `check` repeats them, and refuses others' files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import compressor
from compressor.pipeline import receipt as receipts
from compressor.pipeline.outcome import read_outcome
from compressor.report.facts import facts
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.doc_pages import DOCS, blocks

RECEIPT = "receipt.json"
SETTINGS: dict[str, Any] = {"samples": 24, "sequence_length": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("receipt") / "base", "qwen3_moe")


def made(base: Path, out: Path, *steps: Any, **more: Any) -> Path:
    steps = steps or (compressor.Prune(strategy="reap", experts=4),)
    compressor.compress(str(base), out, steps, calibration=str(small.text_file(base.parent)), **SETTINGS, **more)
    return out


@pytest.fixture(scope="module")
def output(base: Path) -> Path:
    return made(base, base.parent / "output")


@pytest.fixture
def copy(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "copy"))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_the_script_of_the_page_comes_to_the_figures(base: Path, tmp_path: Path, dtype: str) -> None:
    out = made(base, tmp_path / "output", dtype=dtype)
    (script,) = (block.text for block in blocks(DOCS / "reference" / "receipt.md") if block.language == "python")
    assert "compressor" not in script and len(script.splitlines()) <= 42
    command = [sys.executable, "-c", script, str(base), str(out)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    printed = {words[0]: float(words[1]) for words in map(str.split, lines)}
    content = json.loads((out / RECEIPT).read_text())
    assert printed.keys() == content["figures"].keys() == content["band"].keys()
    assert printed == pytest.approx(content["figures"], abs=2e-6 if dtype == "float32" else 1e-2)
    overall = json.loads((out / "compression.json").read_text())["heldout"]["domains"][0]
    assert content["tokens"] == overall["tokens"]
    assert content["figures"]["kl"] == pytest.approx(overall["kl"]["change"], abs=2e-6)
    assert 1 - content["figures"]["agreement"] == pytest.approx(overall["flips"]["change"], abs=2e-6)


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "same"), (0.5, "within the band"), (3.0, "different")])
def test_check_repeats_the_figures_and_tells_others(
    base: Path, copy: Path, run: Run, share: float, verdict: str
) -> None:
    band = json.loads((copy / RECEIPT).read_text())["band"]["kl"]

    def move(content: Any) -> None:
        content["figures"]["kl"] += share * band

    small.edit_json(copy / RECEIPT, move)
    result = run("check", copy, "--base", base, "--receipt", "--json")
    assert json.loads(result.out)["verdict"] == verdict
    assert result.status == (verdict == "different")


def change_id(content: Any) -> None:
    content["text"]["calibration"][0][0][0] += 1


TAMPERED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another token": (change_id, "are not those of its digest"),
    "fewer tokens": (lambda content: content.update(tokens=7), "are not those of its digest"),
    "no number": (lambda content: content["figures"].update(kl="NaN"), "figures.kl should be a number"),
    "an endless band": (lambda content: content["band"].update(kl="Infinity"), "band.kl should be a number"),
    "an unknown field": (lambda content: content.update(more=1), "unknown field 'more'"),
    "another format": (lambda content: content.update(format="moe-compressor-receipt/9"), "format should be"),
    "no batch": (lambda content: content.update(text={"a": [[]]}), "of a batch differ in length"),
    "another base": (lambda content: content["base"]["files"].update({"config.json": "0"}), "name base with --base"),
    "another output": (lambda content: content["output"].update({"more.safetensors": "0"}), "restore the output"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_receipt_of_something_else_is_refused(base: Path, copy: Path, run: Run, case: str) -> None:
    change, message = TAMPERED[case]
    small.edit_json(copy / RECEIPT, change)
    refused(run("check", copy, "--base", base, "--receipt"), message)


def test_other_weights_are_refused(base: Path, copy: Path, run: Run) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors")
    refused(run("check", copy, "--base", base, "--receipt"), "model.safetensors is not the file of")
    refused(run("check", copy, "--receipt"), "add --base")


def test_a_long_text_is_recorded_in_part(
    base: Path, output: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads((output / RECEIPT).read_text())
    size = len(json.dumps(whole["text"]))
    monkeypatch.setattr(receipts, "MOST_TOKEN_BYTES", size // 2)
    part = made(base, tmp_path / "part")
    content = json.loads((part / RECEIPT).read_text())
    assert len(json.dumps(content["text"])) <= size // 2 + 100 and 0 < content["tokens"] < whole["tokens"]
    result = run("check", part, "--base", base, "--receipt", "--json")
    assert json.loads(result.out)["verdict"] == "same"


def test_page_and_card_show_it_and_overwrite_replaces_it(base: Path, output: Path, tmp_path: Path, run: Run) -> None:
    for view in ("page", "card"):
        words = dict(facts(read_outcome(output), view).pairs)["Receipt"]
        assert f"KL {json.loads((output / RECEIPT).read_text())['figures']['kl']:.4f}" in str(words)
    again = made(base, Path(shutil.copytree(output, tmp_path / "again")), overwrite=True)
    assert (again / RECEIPT).read_bytes() == (output / RECEIPT).read_bytes()
    assert RECEIPT in (again / "SHA256SUMS").read_text()
    bare = made(base, tmp_path / "bare", evaluate=False)
    assert not (bare / RECEIPT).exists()
    refused(run("check", bare, "--base", base, "--receipt"), "has no receipt.json")


@pytest.mark.full
def test_constants_and_quantised_outputs_have_a_receipt(base: Path, tmp_path: Path, run: Run) -> None:
    steps = (compressor.Constants(experts=4), compressor.Quantize(scheme="int4", method="gptq"))
    for number, step in enumerate(steps):
        out = made(base, tmp_path / str(number), step)
        result = run("check", out, "--base", base, "--receipt", "--json")
        assert json.loads(result.out)["verdict"] == "same", result.err
