"""The command line from end to end: what it prints, what it refuses, and that killing it at any moment does no harm."""

import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compressor.cli import main as cli
from compressor.files import work_folder
from compressor.hub.card import card_text
from compressor.run_record import read_record
from compressor.steps.workdir import JOURNAL
from tests.support import small, zoo
from tests.support.audit import Moment, fill_disk, happening, press_ctrl_c
from tests.support.command_line import Result, Run, names, refused
from tests.support.small import tree

NAN = "model.layers.1.block_sparse_moe.experts.7.w2.weight"


pytestmark = pytest.mark.usefixtures("offline", "hasty")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    small.save(folder / "single")
    small.save(folder / "sharded", shard="60KB")
    dense = transformers.LlamaConfig(
        vocab_size=small.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(dense).save_pretrained(folder / "dense")
    small.text_file(folder)
    return folder


@pytest.fixture
def model(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "single", tmp_path / "model"))


@pytest.fixture
def data(originals: Path) -> tuple[Any, ...]:
    """Calibration and a strategy that are quick, before other arguments: what comes last counts."""
    sizes = ("--samples", 4, "--sequence-length", 64)
    return ("--strategy", "count-guided", "--calibration", originals / "calibration.txt", *sizes)


@pytest.fixture
def compress(run: Run, tmp_path: Path, data: tuple[Any, ...]) -> Run:
    """Compress a model to 4 experts in the folder `out`, unless more arguments say otherwise."""
    return lambda model, *more: run("compress", model, "-o", tmp_path / "out", "--experts", 4, *data, *more)


# --- what works -------------------------------------------------------------------------------------------------------


def test_compress_writes_a_smaller_model_that_stock_transformers_loads(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    out, source = tmp_path / "out", tree(model)
    result = run("compress", model, "-o", out, "--experts", 4, *data[2:])
    assert result.status == 0 and "Compressed by auto" in result.out and f"Written to {out}" in result.out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.num_local_experts == 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert zoo.logits(loaded, tokenizer("hello", return_tensors="pt")["input_ids"]).isfinite().all()
    weights = (out / "model.safetensors").stat().st_size, (model / "model.safetensors").stat().st_size
    assert weights[0] < 0.8 * weights[1]
    assert tree(model) == source and names(tmp_path) == ["model", "out"]


VARIETIES: list[tuple[Any, ...]] = [
    ("--ratio", 0.4, "--seed", 3),
    ("--experts", 4, "--strategy", "auto"),
    ("--experts", 3, "--strategy", "model-centric"),
    ("--experts", 4, "--strategy", "data-centric", "--merge", "frequency", "--no-merge-routers"),
    ("--experts", 4, "--strategy", "data-centric", "--dtype", "bfloat16", "--device", "cpu"),
]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        *zoo.few([("single", arguments) for arguments in VARIETIES], 2),
        *(zoo.full("sharded", arguments) for arguments in VARIETIES[:2]),
    ],
)
def test_same_bytes_twice_and_by_plan_and_apply(
    kind: str, arguments: tuple[Any, ...], originals: Path, run: Run, data: tuple[Any, ...], tmp_path: Path
) -> None:
    source, plan = originals / kind, tmp_path / "plan.json"
    for name in ("first", "second"):
        assert run("compress", source, "-o", tmp_path / name, *data, *arguments).status == 0
    assert run("plan", source, "-o", plan, *data, *arguments).status == 0
    assert run("apply", plan, "-o", tmp_path / "third").status == 0
    assert tree(tmp_path / "first") == tree(tmp_path / "second") == tree(tmp_path / "third")
    assert names(tmp_path) == ["first", "plan.json", "second", "third"]


def test_a_text_that_no_step_reads_is_for_comparing_and_stays_that_of_an_earlier_run(
    originals: Path, run: Run, data: tuple[Any, ...], tmp_path: Path
) -> None:
    out, later = tmp_path / "out", tmp_path / "later"
    ask = ("--experts", 4, "--strategy", "aimer", "--correct", "none")
    told = run("compress", originals / "single", "-o", out, *data, *ask, "--json")
    assert told.status == 0 and json.loads(told.out)["heldout"]["domains"] and (out / "receipt.json").is_file()
    assert "No text was read to choose experts" in " ".join(card_text(out, "me/small").text.split())
    earlier = json.loads((out / "compression.json").read_text())["plan"]["calibration"]
    assert run("compress", out, "-o", later, "--quantize", "int8", *data[2:4], "--sequence-length", 64).status == 0
    assert (later / "receipt.json").is_file()
    assert json.loads((later / "compression.json").read_text())["plan"]["calibration"] == earlier


@pytest.mark.parametrize("more", [(), ("--correct", "ridge")])
def test_a_command_that_was_stopped_once_its_output_was_in_place_ends_well_when_repeated(
    more: tuple[str, ...], run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    assert run("plan", model, "-o", plan, "--experts", 4, *data, *more).status == 0
    for number, command in enumerate((("compress", model, "--experts", 4, *data, *more), ("apply", plan))):
        out = tmp_path / f"out-{number}"
        with happening(Moment("os.remove", r"/journal\.json$"), press_ctrl_c):  # the first thing that is cleared away
            assert run(*command, "-o", out).status == 130
        record = read_record(out)
        assert record is not None and record.seconds and record.command is not None and record.command[1] == command[0]
        before, times = tree(out), {path: path.stat().st_mtime_ns for path in out.iterdir()}
        assert (work_folder(out) / JOURNAL).exists()
        again = run(*command, "-o", out, "--json")
        assert again.status == 0 and "is in place already and is what this command asks for" in again.err, again
        content = json.loads(again.out)
        assert (content["experts"]["before"], content["experts"]["after"]) == (8, 4)
        assert tree(out) == before and times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
        assert f".{out.name}.moe-compressor" not in names(tmp_path)
    ask = ("compress", model, "-o", tmp_path / "out-0", *data, *more)
    refused(run(*ask, "--experts", 4, "--seed", 1), "exists already")
    refused(run(*ask, "--experts", 2), "exists already")
    (tmp_path / "out-0" / "model.safetensors").touch()
    refused(run(*ask, "--experts", 4), "exists already")


def test_overwrite_replaces_an_old_output(compress: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert compress(model).status == 0
    old = tree(out)
    refused(compress(model, "--experts", 2), "out exists already; name another folder or pass")
    assert tree(out) == old
    assert compress(model, "--experts", 2, "--overwrite").status == 0
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 2
    assert names(tmp_path) == ["model", "out"]


def test_every_command_prints_json(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    printed = {
        "inspect": run("inspect", model, "--json"),
        "one": run("inspect", model, "--experts", 4, "--json"),
        "plan": run("plan", model, "-o", plan, "--experts", 4, "--json", *data),
        "apply": run("apply", plan, "-o", tmp_path / "a", "--json"),
        "compress": run("compress", model, "-o", tmp_path / "b", "--experts", 4, "--json", *data),
        "strategies": run("list", "strategies", "--json"),
    }
    assert {name: result.status for name, result in printed.items()} == dict.fromkeys(printed, 0)
    parsed = {name: json.loads(result.out) for name, result in printed.items()}
    assert all(result.err == "" for result in printed.values())
    assert parsed["plan"] == json.loads(plan.read_text())
    assert parsed["inspect"]["experts"] == 8 and [entry["experts"] for entry in parsed["one"]["outcomes"]] == [4]
    assert parsed["apply"]["experts"] == parsed["compress"]["experts"] == {"before": 8, "after": 4}
    assert parsed["apply"]["bytes"]["after"] == parsed["one"]["outcomes"][0]["bytes"]
    assert {"count-guided", "model-centric", "data-centric"} <= {entry["name"] for entry in parsed["strategies"]}


def test_a_warning_is_one_line_in_each_run(run: Run, model: Path, tmp_path: Path) -> None:
    text = small.text_file(tmp_path, "A short text.")
    arguments = ("--experts", 4, "--strategy", "count-guided", "--calibration", text, "--json")
    for name in ("one", "two"):
        result = run("plan", model, "-o", tmp_path / f"{name}.json", *arguments)
        assert result.status == 0 and json.loads(result.out)["steps"][0]["options"]["strategy"] == "count-guided"
        (short,) = result.err.splitlines()
        assert re.fullmatch(r"WARNING: calibration data .*calibration.txt fills \d+ of 131072 tokens asked for", short)
    assert not any(logging.getLogger(package).handlers for package in ("compressor", "strategies", "exporters"))


# --- bad input --------------------------------------------------------------------------------------------------------


def edit(file: str, **fields: Any) -> Callable[[Path], Any]:
    return lambda folder: small.edit_json(folder / file, lambda content: content.update(fields))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: small.edit_tensors(folder, change)


def put_nan(name: str) -> Callable[[Path], Any]:
    def change(content: dict[str, torch.Tensor]) -> None:
        content[name].view(-1)[-1] = torch.nan

    return tensors(change)


def forget(*files: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / file).unlink() for file in files]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "NaN in an expert": (put_nan(NAN), re.escape(f"tensor '{NAN}' in model.safetensors holds NaN")),
    "attention gone": (
        tensors(lambda t: t.pop("model.layers.1.self_attn.q_proj.weight")),
        "lacks 1 tensors .* such as 'model.layers.1.self_attn.q_proj.weight'; download",
    ),
    "a layer too many": (edit("config.json", num_hidden_layers=3), "lacks 9 tensors .* 'model.layers.2.*; download"),
    "another width": (edit("config.json", hidden_size=64), "shape"),
    "no tokenizer": (forget("tokenizer.json", "tokenizer_config.json"), "has no usable tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "has no usable tokenizer"),
    "too large a vocabulary": (edit("config.json", vocab_size=100), r"shape|the tokenizer makes token"),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "count-guided") for name in DAMAGE),
        *((name, "model-centric") for name in ("NaN in an expert", "attention gone", "another width")),  # reads no text
    ],
)
def test_a_bad_checkpoint(name: str, strategy: str, compress: Run, model: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    damage(model)
    refused(compress(model, "--strategy", strategy), message)
    assert names(tmp_path) == ["model"]


def test_a_dense_model_and_no_model(run: Run, compress: Run, originals: Path, tmp_path: Path) -> None:
    refused(compress(originals / "dense"), r"LlamaForCausalLM \(llama\) has no experts module.*dense model")
    refused(run("inspect", originals / "dense"), "dense model")
    for model, message in (
        (tmp_path / "no" / "such" / "folder", "is not a folder"),
        (originals / "calibration.txt", "is not a folder"),
        ("", "the model's name is empty"),
        ("two\nlines", "two lines is not a folder"),
        ("x" * 5000, "File name too long|is no folder"),
    ):
        refused(compress(model), message)
    refused(compress(originals / "single", "--revision", "main"), "--revision is for Hub ids only")
    assert names(tmp_path) == []


ARGUMENTS: list[tuple[list[Any], str]] = [
    ([], "either --experts N or --ratio R"),
    (["--experts", 9], "9 experts asked for, it has 8; ask for at most 8"),
    (["--experts", "4.5"], "Invalid value for '--experts'"),
    (["--experts", 4, "--strategy", "count-guide"], "no strategy 'count-guide'; did you mean 'count-guided'"),
    (["--experts", 4, "--strategy", "hc-smoe", "--merge", "median"], "merge should be"),
    (["--experts", 4, "--representation", "surrogate"], "'count-guided' has no option 'representation'"),
    (["--experts", 4, "--strategy", "model-centric", "--representation", "x"], "representation should be"),
    (["--experts", 4, "--option", "speed"], "--option 'speed' should be name=value"),
    (["--experts", 4, "--strategy", "model-centric", "--option", "merge=[1]"], r"merge should be"),
    (["--experts", 4, "--unknown"], "No such option: --unknown.*; see moe-compress (compress|plan) --help"),
    (["--experts", 4, "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    (["--experts", 4, "--dtype", "int8"], "no dtype 'int8'; known are auto"),
    (["--experts", 4, "--seed", 10**30], "seed has too many digits"),
    (
        ["--experts", 4, *["--calibration", "a.txt"] * 100],
        "should have at most 100 items after validation, not 101",
    ),
    (["--experts", 4, "--samples", 0], "samples should be greater than or equal to 1, it is 0"),
    (["--experts", 4, "--calibration", "gone.txt"], "calibration file gone.txt does not exist"),
    (["--experts", 4, "surplus"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_bad_arguments(
    arguments: list[Any], message: str, run: Run, originals: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    everything = [*data, *arguments]  # what comes last counts
    refused(run("compress", originals / "single", "-o", tmp_path / "out", *everything), message)
    refused(run("plan", originals / "single", "-o", tmp_path / "plan.json", *everything), message)
    assert names(tmp_path) == []


def test_bad_commands(run: Run, tmp_path: Path) -> None:
    refused(run("squeeze"), "No such command 'squeeze'")
    refused(run("compress"), "Missing argument 'MODEL'|Missing")
    refused(run("compress", "model", "--experts", 4), "Missing option '--output' / '-o'")
    bare = run()
    assert bare.status == 2 and "compress" in bare.out + bare.err


def test_bad_calibration(compress: Run, originals: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    refused(
        compress(originals / "single", "--calibration", text), "tokenizer has no chat template; name a column of text"
    )
    assert names(tmp_path) == ["a.jsonl"]


def test_bad_outputs(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    def go(out: Any, *more: str) -> Result:
        return run("compress", model, "-o", out, "--experts", 4, *data, *more)

    notes, file, source = tmp_path / "notes", tmp_path / "file", tree(model)
    notes.mkdir()
    (notes / "diary.txt").write_text("dear diary")
    file.touch()
    (tmp_path / "link").symlink_to("nowhere")
    before = names(tmp_path)
    for out in (notes, file, tmp_path / "link"):
        refused(go(out), "exists already; name another folder or pass --overwrite")
        refused(go(out, "--overwrite"), "is not a checkpoint folder, so --overwrite will not replace it")
    for out in (model, model / "out", model / "sub" / "out"):
        refused(go(out, "--overwrite"), "lies in the source checkpoint itself")
    refused(go(tmp_path, "--overwrite"), "holds the source checkpoint, which it would replace")
    refused(go(tmp_path / "no" / "parent"), "no is not a folder; create it or name another output folder")
    refused(go(file / "out"), "file is not a folder")
    refused(go(tmp_path / ("x" * 300)), "File name too long")
    refused(go(""), "exists already|lies in|holds")
    assert names(tmp_path) == before and tree(model) == source
    assert (notes / "diary.txt").read_text() == "dear diary"


def test_a_full_disk(compress: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    refused(compress(model), "the output needs .* GB, .* has 0.00 GB free; free some space or write elsewhere")
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("name", ["modèl", "模型"])
def test_what_a_terminal_cannot_show_is_escaped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str
) -> None:
    named = model.rename(tmp_path / name)
    for more in ((), ("--json",)):
        content = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding, write_through=True))
        monkeypatch.setattr(sys, "argv", ["moe-compress", "inspect", str(named), *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
    assert json.loads(content.getvalue().decode(encoding))["model"].endswith(name)


def test_an_output_with_a_name_that_is_no_text_is_refused(compress: Run, model: Path, tmp_path: Path) -> None:
    refused(compress(model, "-o", os.fsdecode(bytes(tmp_path) + b"/odd\xff")), "has a byte that is no UTF-8")


@pytest.mark.parametrize("event", ["os.pwrite", "os.fsync"])
def test_a_disk_that_fills_up_meanwhile(event: str, compress: Run, model: Path, tmp_path: Path) -> None:
    with happening(Moment(event), fill_disk):
        refused(compress(model), "is full; free some space and run")
    assert names(tmp_path) == ["model"]


def test_bad_plan_outputs(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    def go(out: Path, *more: str) -> Result:
        return run("plan", model, "-o", out, "--experts", 4, *data, *more)

    source = tree(model)
    refused(go(model / "config.json"), "config.json exists already; name another file or pass --overwrite")
    refused(go(model / "config.json", "--overwrite"), "config.json is not a plan, so --overwrite will not replace it")
    refused(go(model, "--overwrite"), "is not a plan")
    refused(go(tmp_path / "no" / "plan.json"), "no does not exist")
    assert tree(model) == source and names(tmp_path) == ["model"]
    plan = tmp_path / "plan.json"
    assert go(plan).status == 0 and go(plan).status == 2 and go(plan, "--overwrite").status == 0


# --- edited plans -----------------------------------------------------------------------------------------------------


def test_no_plan_at_all(run: Run, originals: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    refused(run("apply", tmp_path / "gone.json", *out), "gone.json cannot be read")
    refused(run("apply", originals, *out), r"cannot be read \(Is a directory\)")
    refused(run("apply", originals / "single" / "config.json", *out), "format is None")
    refused(run("apply", originals / "single" / "model.safetensors", *out), "is not valid JSON")
    assert names(tmp_path) == []
