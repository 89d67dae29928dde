"""`--format mone`: what is written computes what a plain model with constants does; repeated, refused, told."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compressor
from compressor.divergence.logits import read_logits
from compressor.errors import CompressionError
from compressor.hub.card import card_text
from compressor.hub.check import verify_folder
from compressor.model.substitution import Substitution
from compressor.recipe.steps_plan import Plan
from compressor.steps.constants.step import read_constants
from tests.support import quantized, small, zoo
from tests.support.command_line import Run, refused
from tests.support.model_server import serving
from tests.support.plans import Decided, plan_of

pytestmark = pytest.mark.usefixtures("offline")
SUFFIX = ".approx_value"
NAMES = {"mixtral": "block_sparse_moe", "deepseek_v3": "mlp"}


def data(folder: Path, samples: int = 16) -> dict[str, Any]:
    """Calibration text of its own."""
    return {"calibration": str(small.text_file(folder)), "samples": samples, "sequence_length": 32, "constants": True}


def plain_model(folder: Path, source: Path, scratch: Path) -> Any:
    """The stock model with a written checkpoint's tensors, NaN for those that it lacks; constants by a plain loop."""
    stored, original = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    constants = {name: stored.pop(name) for name in list(stored) if name.endswith(SUFFIX)}
    filled = {name: stored.get(name, torch.full_like(value, torch.nan)) for name, value in original.items()}
    assert stored.keys() <= original.keys()
    scratch.mkdir()
    save_file(filled, scratch / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    listed = config.pop("approximate_experts")
    (scratch / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    block = NAMES[config["model_type"]]
    for layer, experts in listed.items():
        own = {expert: constants.pop(f"model.layers.{layer}.{block}.experts.{expert}{SUFFIX}") for expert in experts}
        module = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        kept = module.forward

        def forward(
            hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, kept: Any = kept, own: Any = own
        ) -> torch.Tensor:
            rows = []
            for token in range(len(hidden)):
                total = torch.zeros_like(hidden[token])
                for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                    if expert in own:
                        total = total + weight * own[expert].float()
                    else:
                        one = torch.tensor([[expert]])
                        total = total + kept(hidden[token][None], one, weight.reshape(1, 1))[0]
                rows.append(total)
            return torch.stack(rows)

        module.forward = forward
    assert not constants
    return model


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("mixtral", {"experts": 6}),
        zoo.full("mixtral", {"experts_total": 9, "samples": 64}),
        zoo.full("deepseek_v3", {"ratio": 0.4, "budget": "uneven", "correct": "ridge", "samples": 64}),
        zoo.full("mixtral", {"ratio": 0.4, "correct": "tune", "samples": 32}),
    ],
)
def test_what_is_written_computes_what_a_plain_model_with_constants_does(
    name: str, request_: dict[str, Any], tmp_path: Path
) -> None:
    source, out = small.save(tmp_path / "source", name), tmp_path / "out"
    made = compressor.compress(str(source), out, **{**data(tmp_path), **request_})
    plan, config = made.plan.expert_plan, json.loads((out / "config.json").read_text())
    listed = {str(layer.layer): list(layer.constants) for layer in plan.layers if layer.constants}
    assert config["approximate_experts"] == listed
    assert config["num_local_experts" if name == "mixtral" else "n_routed_experts"] == 8  # which the router has
    total = sum(len(layer.groups) for layer in plan.layers)
    assert total == {"experts": 12, "experts_total": 9, "ratio": 10}[next(iter(request_))]  # of 2 layers of 8
    tensors, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    changed = {key for key in tensors.keys() & original.keys() if not torch.equal(tensors[key], original[key])}
    if request_.get("correct") == "ridge":
        assert changed and all(".experts." in key and "down_proj" in key for key in changed)
    elif request_.get("correct") == "tune":
        assert any(".experts." in key for key in changed)
    else:
        assert not changed  # copies of the stored bytes, routers whole
    assert all(tensors[key].dtype == torch.float32 for key in tensors if key.endswith(SUFFIX))
    tokens = torch.arange(40).reshape(2, 20) * 13 % small.VOCABULARY
    expected = zoo.logits(plain_model(out, source, tmp_path / "plain"), tokens)
    written, constants = read_constants(out)
    variant = Substitution(constants=constants)
    [found] = read_logits(written, [(variant, tokens, torch.ones_like(tokens, dtype=torch.bool))], torch.Tensor.float)
    torch.testing.assert_close(found, expected.flatten(0, 1), atol=2e-5, rtol=1e-4)
    # the plan and the source give the same bytes again
    again = tmp_path / "again"
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(made.plan.to_json())
    compressor.apply(plan_file, again, model=str(source))
    assert small.tree(again) == small.tree(out)
    if "correct" in request_:
        figures = [layer.figures["correction"] for layer in plan.layers if layer.constants]
        assert all(entry["heldout_error"] <= entry["heldout_error_before"] for entry in figures)


def test_everything_says_that_stock_transformers_cannot_load_it(tmp_path: Path, run: Run) -> None:
    source, out = small.save(tmp_path / "source"), tmp_path / "out"
    text = ["--calibration", str(small.text_file(tmp_path)), "--samples", "8", "--sequence-length", "16"]
    made = run("compress", source, "-o", out, "--format", "mone", "--experts", "6", *text)
    assert made.status == 0, made.err
    assert "stock transformers cannot" in " ".join(made.out.split())
    assert "Constants stand for 4 of the 16 experts" in made.out
    shown = " ".join(run("inspect", out, "--json").out.split())
    assert "for 4 of 16 experts; " in shown and "cannot load" in shown
    card = card_text(out, "me/small").text
    assert "stock transformers cannot load them" in " ".join(card.split()) and "AutoModelForCausalLM" not in card
    assert "- constants:\n    experts: 6\n" in card
    assert verify_folder(out).weights == {"model.safetensors"}
    refused = run("compress", out, "-o", tmp_path / "more", "--experts", "4", "--calibration", "demo")
    assert refused.status != 0 and "stock transformers cannot load" in " ".join(refused.err.split())
    recipe = run("compress", out / "recipe.yaml", "-o", tmp_path / "twice", "--set", f"model={source}", *text)
    assert recipe.status == 0, recipe.err
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    plan = run("plan", source, "-o", tmp_path / "plan.json", "--format", "mone", "--experts", "6", *text)
    assert plan.status == 0 and Plan.load(tmp_path / "plan.json").constants is not None
    for option, told in {
        "--routers router": "cannot stand after constants", "--strategy reap": "constants has no option 'strategy'",
        "--sequential": "constants has no option 'sequential'",
        "--gate demo": "--gate", "--experts-total 3": "one of --experts", "--format mone,onnx": "written alone",
    }.items():  # fmt: skip
        arguments = ["--format", "mone", "--experts", "6", *text, *option.split()]
        found = run("compress", source, "-o", tmp_path / "no", *arguments)
        assert found.status != 0 and told in " ".join(found.err.split()), found.err
    for option in ("--top-k 1", "--split 2"):
        arguments = ["--format", "mone", "--ratio", "0.25", *text, *option.split()]
        found = run("compare", source, "-o", tmp_path / "no", *arguments)
        assert found.status != 0 and "whole experts" in " ".join(found.err.split()), found.err
    bare = run("compress", source, "-o", tmp_path / "no", "--experts-total", "9", *text)
    assert bare.status != 0 and "--format mone" in bare.err
    assert not (tmp_path / "no").exists()


def test_a_damaged_checkpoint_a_fused_one_and_impossible_numbers_are_refused(tmp_path: Path) -> None:
    source, out = small.save(tmp_path / "source"), tmp_path / "out"
    compressor.compress(str(source), out, experts=6, **data(tmp_path, 8))
    stored = load_file(out / "model.safetensors")
    lost = next(name for name in stored if name.endswith(SUFFIX))
    prefix, whole = lost.removesuffix(SUFFIX).rpartition(".")[0], range(8)
    more = next(f"{prefix}.{n}{SUFFIX}" for n in whole if f"{prefix}.{n}{SUFFIX}" not in stored)
    for change, told in (
        (lambda tensors: tensors.pop(lost), "has no constant"),
        (lambda tensors: tensors.update({more: stored[lost]}), "does not name it"),
    ):
        kept = (out / "model.safetensors").read_bytes()
        small.edit_tensors(out, change)
        with pytest.raises(CompressionError, match=told):
            read_constants(out)
        (out / "model.safetensors").write_bytes(kept)
    for numbers, told in (({"experts": 1}, "top-k"), ({"experts_total": 17}, "cannot be kept"), ({}, "one of --exp"),
                          ({"experts_total": 9, "budget": "even"}, "does not divide"),
                          ({"experts_total": 9, "samples": 8}, "leaves 4; calibrate on more sequences")):  # fmt: skip
        with pytest.raises(CompressionError, match=told):
            plan_of(source, **{**data(tmp_path), **numbers})
    fused = small.save(tmp_path / "fused", "gpt_oss")
    with pytest.raises(CompressionError, match="store all experts of a layer together"):
        plan_of(fused, experts=6, **data(tmp_path))


def test_quantised_experts_are_copied_and_the_constants_plain(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    quantized.save_fp8(source, sizes={"vocab_size": small.VOCABULARY})
    small.tokenizer().save_pretrained(source)
    compressor.compress(str(source), out, experts=5, **data(tmp_path, 8))
    written, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    constants = {name for name in written if name.endswith(SUFFIX)}
    assert len(constants) == 6 and {written[name].dtype for name in constants} == {torch.bfloat16}
    for name in written.keys() - constants:
        assert written[name].dtype == original[name].dtype
        assert torch.equal(written[name].view(torch.uint8), original[name].view(torch.uint8))
    gone = {name.removesuffix(SUFFIX) for name in constants}
    assert original.keys() - written.keys() == {n for n in original if any(n.startswith(f"{each}.") for each in gone)}
    with pytest.raises(CompressionError, match="stay quantised"):
        plan_of(source, experts=5, correct="ridge", **data(tmp_path, 8))


def test_a_plan_with_constants_can_be_edited_and_not_be_made_impossible(tmp_path: Path) -> None:
    source = small.save(tmp_path / "source")
    content = plan_of(source, experts=6, **data(tmp_path, 8)).to_dict()

    def read(layer: dict[str, Any], **more: Any) -> Decided:
        edited = copy.deepcopy({**content, **{name: more.pop(name) for name in ("calibration",) if name in more}})
        decided = edited["steps"][0]["plan"]
        decided |= {"layers": [layer, decided["layers"][1]], **more}
        return Plan.from_dict(edited).expert_plan

    first = content["steps"][0]["plan"]["layers"][0]
    kept, gone = first["groups"][0]["members"][0], first["constants"][0]
    first["groups"][0]["members"] = [gone]
    with pytest.raises(CompressionError, match="constants stand for"):
        read({**first, "dropped": []})
    swapped = sorted([*first["constants"][1:], kept])
    edited = {**first, "constants": swapped, "dropped": swapped}
    assert read(edited).layers[0].constants == tuple(swapped)
    for change, told in (({"calibration": None}, "calibration"), ({"experts_total": 11}, "make them equal")):
        with pytest.raises(CompressionError, match=told):
            read(edited, **change)


@pytest.mark.parametrize("given", [("--budget", "uneven", "--ratio", "0.25"), ("--experts-total", "10")])
def test_uneven_layers_are_refused_where_no_format_holds_them(run: Run, tmp_path: Path, given: tuple[str, ...]) -> None:
    source = small.save(tmp_path / "model")
    refused(run("compress", source, "-o", tmp_path / "out", *given), "only with constants.*pass --format mone")


@pytest.mark.parametrize("name", ["mixtral", zoo.full("deepseek_v3")])
@pytest.mark.usefixtures("golden")
def test_check_tells_servers_that_know_constants_from_others(name: str, run: Run, tmp_path: Path) -> None:
    source, out = small.save(tmp_path / "source", name), tmp_path / "out"
    text = ("--calibration", small.text_file(tmp_path), "--samples", 16, "--sequence-length", 32)
    made = run("compress", source, "-o", out, "--format", "mone", "--experts", 5, *text)
    for said in (made.out, card_text(out, "org/smaller").text):
        assert "served by vLLM from 0.33 on" in " ".join(said.split())
    assert run("check", out).status == 0
    with serving(out, plain_model(out, source, tmp_path / "plain")) as served:
        result = run("check", out, "--server", served.address, "--json")
        assert (result.status, json.loads(result.out)["verdict"]) == (0, "same")
    # of vLLM before 0.33, which has nothing in place of the experts
    tensors = load_file(out / "model.safetensors")
    for key in [key for key in tensors if key.endswith(SUFFIX)]:
        tensors[key].zero_()
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_bytes((out / "config.json").read_bytes())
    save_file(tensors, older / "model.safetensors", {"format": "pt"})
    with serving(out, plain_model(older, source, tmp_path / "ignoring")) as served:
        result = run("check", out, "--server", served.address, "--json")
    assert result.status == 1 and "vLLM before 0.33" in json.loads(result.out)["cause"]
