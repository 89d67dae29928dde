"""Correction from the command line: the same bytes whichever way, what is refused, and killing it does no harm."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import compressor
from tests.support import small, zoo
from tests.support.command_line import Run, captured, names, refused
from tests.support.plans import pruned
from tests.support.small import tree

LENGTH, SAMPLES = 32, 8
SIZES = ("--samples", str(SAMPLES), "--sequence-length", str(LENGTH))


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file and in several, one in bfloat16, and two texts."""
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "single")
    small.save(folder / "sharded", shard="60KB")
    transformers.AutoModelForCausalLM.from_pretrained(folder / "single", dtype=torch.bfloat16).save_pretrained(
        folder / "half"
    )
    small.tokenizer().save_pretrained(folder / "half")
    small.text_file(folder)
    (folder / "other.txt").write_text("\n\n".join(f"{n} + {n * 7} = {n * 8}." for n in range(200)))
    return folder


@pytest.fixture
def data(home: Path) -> tuple[Any, ...]:
    return ("--experts", 4, "--calibration", home / "calibration.txt", *SIZES)


def record(out: Path) -> dict[str, Any]:
    """The plan in compression.json."""
    content: dict[str, Any] = json.loads((out / "compression.json").read_text(encoding="utf-8"))["plan"]
    return content


def changed(one: Path, other: Path) -> set[str]:
    """Names of tensors whose values differ between two checkpoints of one file each."""
    left, right = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert set(left) == set(right)
    return {name for name in left if not torch.equal(left[name], right[name])}


@pytest.mark.parametrize(
    ("strategy", "correct", "method"),
    [
        ("auto", None, "tune"),
        ("auto", "none", None),
        ("count-guided", None, None),
        ("count-guided", "ridge", "ridge"),
        (None, None, "tune"),
    ],
)
def test_what_is_asked_for_and_what_is_the_default(
    strategy: str | None, correct: str | None, method: str | None,
    run: Run, home: Path, data: tuple[Any, ...], tmp_path: Path,
) -> None:  # fmt: skip
    chosen = ("--strategy", strategy) if strategy else ()
    given = ("--correct", correct) if correct else ()
    assert run("plan", home / "single", "-o", tmp_path / "plan.json", *data, *chosen, *given).status == 0
    made = json.loads((tmp_path / "plan.json").read_text())
    (prune,) = (step["options"] for step in made["steps"])
    assert prune["correct"]["method"] == (method or "none")
    assert prune["strategy"] == (strategy or "auto") and not prune["sequential"]
    assert all("correction" not in layer["figures"] for layer in pruned(made)["layers"])


FEW = ("--set", "prune.correct.steps=2")
WAYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tune": ("single", ("--correct", "tune", *FEW)),
    "ridge": ("single", ("--correct", "ridge", "--seed", 5)),
    "in order": ("sharded", ("--correct", "ridge", "--sequential")),
    "in order, not corrected": ("single", ("--correct", "none", "--sequential")),
    "merged": ("sharded", ("--correct", "ridge", "--strategy", "hc-smoe")),
    "attributed": ("single", ("--strategy", "hub-guided")),
    "attributed, in order": ("single", ("--correct", "ridge", "--strategy", "hub-guided", "--sequential")),
    "in float32": ("half", ("--correct", "ridge", "--dtype", "float32")),
    "in its own dtype": ("half", ("--correct", "tune", *FEW)),
}  # fmt: skip


@pytest.mark.parametrize("way", zoo.few(WAYS, 2))
def test_plan_and_apply_give_the_bytes_of_compress(
    way: str, run: Run, home: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    kind, options = WAYS[way]
    weighted = ("--calibration", f"{home / 'calibration.txt'}=3", "--calibration", f"{home / 'other.txt'}=1")
    arguments = ("--strategy", "gated-mass", *data[:2], *weighted, *SIZES, *options)
    assert run("compress", home / kind, "-o", tmp_path / "one", *arguments).status == 0
    assert run("plan", home / kind, "-o", tmp_path / "plan.json", *arguments).status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "two").status == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert names(tmp_path) == ["one", "plan.json", "two"]
    made = record(tmp_path / "two")
    upstream = "compressed" if "--sequential" in options else "original"
    assert {layer["upstream"] for layer in pruned(made)["layers"]} == {upstream}
    assert made["steps"][0]["options"]["sequential"] == ("--sequential" in options)
    assert [round(entry["weight"], 6) for entry in made["calibration"]["sources"]] == [0.75, 0.25]


def test_a_strategy_without_data_is_corrected_on_calibration(run: Run, home: Path, tmp_path: Path) -> None:
    command = ("compress", home / "single", "--strategy", "model-centric", "--experts", 4)
    gone = ("--calibration", tmp_path / "gone.txt")
    refused(run(*command, "-o", tmp_path / "out", "--correct", "ridge", *gone), "gone.txt does not exist")
    assert names(tmp_path) == []
    assert run(*command, "-o", tmp_path / "plain", *gone).status == 0  # none is read
    text = ("--calibration", home / "calibration.txt", *SIZES)
    assert run(*command, "-o", tmp_path / "out", "--correct", "ridge", *text).status == 0
    assert record(tmp_path / "plain")["calibration"] is None
    made = record(tmp_path / "out")
    assert made["calibration"]["source"] == "calibration.txt"
    assert made["steps"][0]["options"]["correct"]["method"] == "ridge"
    assert changed(tmp_path / "plain", tmp_path / "out")


@pytest.fixture(scope="module")
def planned(home: Path) -> dict[str, Any]:
    """A plan with a correction, and the text that it was made on."""
    result = captured(
        "plan", home / "single", "-o", home / "planned.json", "--experts", 4, "--strategy", "count-guided",
        "--correct", "tune", "--calibration", home / "calibration.txt", "--json", *SIZES,
    )  # fmt: skip
    content: dict[str, Any] = json.loads(result.out)
    return content


Edit = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "unknown dtype": (lambda c: c.update(dtype="int3"), "there is no dtype 'int3'"),
    "no data": (lambda c: c.update(calibration=None), "a correction needs calibration data; restore calibration"),
    "other seed": (lambda c: c["calibration"].update(seed=1), "no longer gives the tokens|repeating it gives"),
    "other length": (lambda c: c["calibration"]["asked"].update(sequence_length=16), "no longer gives the tokens"),
    "other digest": (
        lambda c: c["calibration"]["sources"][0].update(sha256="0" * 64),
        "calibration.txt no longer gives the tokens that the plan was made with .*; restore it or plan again",
    ),
    "text gone": (lambda c: c["calibration"]["sources"][0].update(source="gone.txt"), "gone.txt does not exist"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_correction_is_refused(name: str, run: Run, planned: dict[str, Any], tmp_path: Path) -> None:
    change, message = EDITS[name]
    content = json.loads(json.dumps(planned))
    change(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    refused(run("apply", tmp_path / "plan.json", "-o", tmp_path / "out", "--json"), message)
    assert names(tmp_path) == ["plan.json"]


def test_a_step_refits_on_text_of_its_own(home: Path, tmp_path: Path) -> None:
    sizes = {"samples": SAMPLES, "sequence_length": LENGTH}
    text = str(home / "calibration.txt")
    for name, file in (("shared", None), ("same", "calibration.txt"), ("other", "other.txt")):
        own = {} if file is None else {"calibration": {"data": [str(home / file)], **sizes}}
        steps = [compressor.Prune(experts=4, strategy="model-centric", correct="ridge", **own)]
        compressor.compress(str(home / "single"), tmp_path / name, steps, calibration=text, **sizes)
    assert not changed(tmp_path / "same", tmp_path / "shared")
    found = changed(tmp_path / "other", tmp_path / "shared")
    assert found and all("experts" in key for key in found)  # the routers are the pruned ones
