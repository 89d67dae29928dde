"""`compare --sizes` and `compress --bytes` on the command line, and what they refuse."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import DynamicCache

from compressor.model.inputs import cache_argument
from compressor.report.sizes import cache_bytes
from tests.support import small, zoo
from tests.support.command_line import Run, names, refused

SIZES = ("--samples", 24, "--sequence-length", 32, "--strategies", "count-guided", "--shares", "1,1/2")

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "model", hidden_size=64, intermediate_size=64)
    small.text_file(folder)
    return folder


def test_compare_by_size_writes_all_rows_and_names_the_best(home: Path, run: Run, tmp_path: Path) -> None:
    out, text = tmp_path / "out", home / "calibration.txt"
    sizes = ("--schemes", "int4,none,nvfp4", "--evaluation-samples", 8, "--for", "vllm,transformers")
    result = run("compare", home / "model", "--bits", 7, "-o", out, "--calibration", text, *SIZES, *sizes)
    assert result.status == 0, result.err
    assert names(out) == ["comparison.json", "comparison.md", "comparison.png"]
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    shown = [(pair["experts"], pair["scheme"]) for pair in content["rows"]]
    assert shown[:2] == [(8, "none"), (4, "none")]
    # one of them drawn at random; eight in int4 don't fit
    assert sorted(shown[2:]) == [(4, "by layer"), (4, "by layer"), (4, "one width")]
    assert [pair["kl"] > 0 for pair in content["rows"]] == [False, *4 * [True]]
    formats = {
        label for pair in content["rows"] for units in (pair["layers"] or {}).values() for label in units.values()
    }
    assert formats <= {"int4/64", "int4/32"}  # NVFP4 is not loaded by transformers
    for pair in content["rows"]:
        assert (pair["predicted"] is None) == (pair["scheme"] == "none" or pair["strategy"] == "random")
        assert pair["scheme"] == "none" or pair["bytes"] <= content["limit"]
    parameters = sum(value.numel() for value in load_file(home / "model" / "model.safetensors").values())
    assert (content["parameters"], content["limit"]) == (parameters, 7 * parameters // 8)
    assert all(pair["bits"] == pytest.approx(8 * pair["bytes"] / parameters) for pair in content["rows"])
    assert "Left out: nvfp4 (transformers" in result.out
    assert "fp8, int8, int3, int2, mxfp4" in result.out


def test_formats_are_crossed_with_strategies_corrections_and_sub_experts(home: Path, run: Run, tmp_path: Path) -> None:
    out, text = tmp_path / "out", home / "calibration.txt"
    grid = ("--schemes", "none,int4", "--strategies", "count-guided,aimer", "--correct", "none,ridge", "--split", "1,2")
    sizes = ("--samples", 24, "--sequence-length", 32, "--shares", "1/2", "--evaluation-samples", 8)
    result = run("compare", home / "model", "-o", out, "--calibration", text, *sizes, *grid)
    assert result.status == 0, result.err
    base, *rows = json.loads((out / "comparison.json").read_text(encoding="utf-8"))["rows"]
    assert (base["name"], base["scheme"], base["experts"]) == ("base", "none", 8)
    ways = [(row["name"], row["correction"], row["split"], row["scheme"]) for row in rows]
    names_of_grid = product(("count-guided", "aimer"), ("none", "ridge"), (1, 2), ("none", "int4"))
    assert sorted(ways) == sorted(names_of_grid) and all(row["experts"] == 4 * row["split"] for row in rows)
    assert len({row["label"] for row in rows}) == len(rows)


@pytest.mark.full
def test_compress_takes_the_best_that_fits_and_leaves_steps_that_repeat_it(
    home: Path, run: Run, tmp_path: Path
) -> None:
    out, again, text = tmp_path / "out", tmp_path / "again", home / "calibration.txt"
    sizes = ("--samples", 64, "--sequence-length", 32, "--calibration", text, "--strategy", "count-guided")
    result = run("compress", home / "model", "-o", out, "--bytes", "250kB", *sizes)
    assert result.status == 0 and "that fit in 250 kB" in result.err and "Not tried: GPTQ" in result.err
    tensors = load_file(out / "model.safetensors")
    assert sum(value.nbytes for value in tensors.values()) <= 250_000
    steps = yaml.safe_load((out / "recipe.yaml").read_text())["steps"]
    experts = {units["experts"] for units in steps[-1]["quantize"]["layers"].values()}
    assert len(experts) == 1  # which stock transformers reads alike in all layers
    assert run("compress", out / "recipe.yaml", "-o", again).status == 0
    for name, value in load_file(again / "model.safetensors").items():
        assert torch.equal(value.view(torch.uint8), tensors[name].view(torch.uint8)), name


BYTES = ("compress", "model", "-o", "out", "--bytes", "16GB")
SIZED = ("compare", "model", "--sizes")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ((*BYTES, "--experts", 4), "--bytes finds the number of experts; leave out --experts, --ratio and --search"),
        ((*BYTES, "--ratio", 0.5), "--bytes finds the number of experts; leave out --experts, --ratio and --search"),
        ((*BYTES, "--set", "quantize.scheme=int4"), "it needs the step prune, and no quantize"),
        ((*BYTES, "--format", "mone"), "it needs the step prune, and no quantize"),
        ((*BYTES, "--top-k", 1), "leave out --top-k"),
        ((*BYTES, "--for", "vlm"), "there is no server 'vlm'; did you mean 'vllm'?"),
        (("compress", "model", "-o", "out", "--for", "vllm"), "--for goes with --bytes"),
        (("compress", "model", "-o", "out", "--bytes", "16XB"), "'16XB' is no size; write 16GB"),
        ((*SIZED, "--experts", "4"), "leave out --experts, --ratio"),
        ((*SIZED, "--bits", "2", "--bytes", "1GB"), "stands in place of --bytes"),
        ((*SIZED, "--correct", "none,rigde"), "rigde"),
        ((*SIZED, "--strategies", "reap,atuo"), "there is no strategy 'atuo'"),
        ((*SIZED, "--split", "1,two"), r"splits\[1\] should be a whole number, or 'auto', it is 'two'"),
        ((*SIZED, "--shares", "1,1/0"), r"shares\[1\] should be a fraction, it is '1/0'"),
        ((*SIZED, "--shares", "3/2"), "above 0 and up to 1"),
        ((*SIZED, "--schemes", "int5"), "there is no format 'int5'; did you mean"),
    ],
)
def test_contradictions_are_one_sentence(
    command: tuple[Any, ...], sentence: str, home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    refused(run(*command, "--calibration", "calibration.txt"), sentence)


def test_a_limit_beyond_both_ends_is_one_sentence(home: Path, run: Run, tmp_path: Path) -> None:
    command = ("compress", home / "model", "-o", tmp_path / "out", "--calibration", home / "calibration.txt")
    command = (*command, "--samples", 24, "--sequence-length", 32, "--strategy", "count-guided", "--correct", "none")
    refused(
        run(*command, "--bytes", "1kB"),
        "Nothing fits in 1 kB: the smallest is 4 of 8 experts, by layer, with",
    )
    refused(run(*command, "--bytes", "1GB"), "which fits already")
    recipe = {
        "model": str(home / "model"),
        "calibration": {"data": str(home / "calibration.txt"), "samples": 24, "sequence_length": 32},
        "fit": {"bytes": "1kB"},
    }
    (home / "fit.yaml").write_text(yaml.safe_dump(recipe))
    refused(run("compress", home / "fit.yaml", "-o", tmp_path / "out"), "Nothing fits in 1 kB")
    refused(run("plan", home / "fit.yaml", "-o", tmp_path / "out"), "only compress carries out a fit")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_keys_and_values_take_what_the_stock_cache_does(name: str) -> None:
    model, tokens = zoo.build(name), 6
    cache = DynamicCache(config=model.config)
    model(input_ids=zoo.tokens(model, 1, tokens), **{cache_argument(model): cache})
    nbytes = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert cache_bytes(model.config, tokens, torch.float32) == sum(nbytes)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(nbytes)
    longer = cache_bytes(model.config, 1001, torch.float32) - cache_bytes(model.config, 1000, torch.float32)
    assert longer == kinds.count("full_attention") * nbytes[0] // tokens  # beyond the window, others grow no more


@pytest.mark.full
def test_random_experts_are_drawn_from_each_routing_group(home: Path, run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "deepseek_v3", hidden_size=64, moe_intermediate_size=64)
    sizes = ("--samples", 24, "--sequence-length", 32, "--calibration", home / "calibration.txt", "--correct", "none")
    nbytes = sum(value.nbytes for value in small.tensors_of(model).values())
    assert (
        run("compare", model, "-o", tmp_path / "out", "--bytes", nbytes // 5, *sizes, "--strategies", "aimer").status
        == 0
    )
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    assert [row["experts"] for row in rows if row["name"] == "random"]
