"""Experts that are stored in unlike dtypes: kept ones keep their own, merges have the widest of their members."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compressor
from compressor.checkpoint.source import locate
from compressor.model.opened import load_whole, open_model
from compressor.pipeline.verify import verify_against_base
from compressor.recipe.plan import LayerPlan, Source
from tests.support import small, zoo
from tests.support.plans import Decided, by_hand, disposition
from tests.support.quantized import dequantized, plain_model, save_fp8

Tensors = dict[str, Tensor]

PRUNE = compressor.Prune(strategy="aimer", experts=4)
MERGE = compressor.Prune(strategy="hc-smoe", experts=4)
RIDGE = {"correct": compressor.Correct("ridge")}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
UNLIKE = {1: torch.float32, 4: torch.float16, 6: torch.float32}  # dtypes of experts; the others' is bfloat16


def with_unlike_experts(tensors: Tensors) -> None:
    """Store some experts in other dtypes, with digits that bfloat16 has no room for, and norms in float32."""
    for name, value in tensors.items():
        named = EXPERT.fullmatch(name)
        dtype = UNLIKE.get(int(named[2])) if named else torch.float32 if "norm" in name else None
        if dtype is not None:
            tensors[name] = (value.float() * 1.001).to(dtype)


def save(folder: Path, name: str, change: Callable[[Tensors], None] = with_unlike_experts) -> Path:
    zoo.build(name, vocab_size=small.VOCABULARY).bfloat16().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    small.edit_tensors(folder, change)
    return folder


def made(folder: Path, out: Path, *steps: Any) -> compressor.Outcome:
    text = small.text_file(out.parent)
    return compressor.compress(str(folder), out, steps, calibration=str(text), samples=16, sequence_length=32)


def sources(outcome: compressor.Outcome, base: Tensors) -> dict[str, list[tuple[Tensor, float]]]:
    """The base's tensors of each of the output's experts, with their shares, by the names in the output."""
    found = {}
    plans = {layer["module"].split(".")[2]: layer["groups"] for layer in disposition(outcome.plan)["layers"]}
    for name in base:
        named = EXPERT.fullmatch(name)
        groups = plans.get(name.split(".")[2], []) if named else []
        if named and int(named[2]) < len(groups):
            group = groups[int(named[2])]
            shares = [share * group.get("scale", 1.0) for share in group["coefficients"]]
            members = [base[f"{named[1]}.{member}.{named[3]}"] for member in group["members"]]
            found[name] = list(zip(members, shares, strict=True))
    return found


@pytest.mark.parametrize("name", ["qwen3_moe", zoo.full("mixtral"), zoo.full("deepseek_v3")])
def test_a_drop_keeps_every_experts_bits(name: str, tmp_path: Path) -> None:
    base = save(tmp_path / "in", name)
    outcome = made(base, tmp_path / "out", PRUNE)
    before, after = small.tensors_of(base), small.tensors_of(tmp_path / "out")
    expected = sources(outcome, before)
    assert {str(members[0][0].dtype) for members in expected.values()} > {"torch.bfloat16"}
    for key, value in after.items():
        wanted = expected[key][0][0] if key in expected else before[key]
        assert value.dtype == wanted.dtype, key
        assert key not in expected or torch.equal(value, wanted), key
    assert verify_against_base(tmp_path / "out", str(base)).passed


@pytest.mark.parametrize("name", [zoo.full("qwen3_moe"), "mixtral"])
def test_a_merge_is_computed_and_written_in_the_widest_dtype_of_its_members(name: str, tmp_path: Path) -> None:
    base = save(tmp_path / "in", name)
    outcome = made(base, tmp_path / "out", MERGE)
    after = small.tensors_of(tmp_path / "out")
    kinds = set()
    for key, members in sources(outcome, small.tensors_of(base)).items():
        dtypes = {member.dtype for member, _ in members}
        kinds.add(len(dtypes))
        widest = dtypes.pop() if len(dtypes) == 1 else torch.float32
        wanted = sum(member.double() * share for member, share in members)
        assert after[key].dtype == widest, key
        within = torch.finfo(widest).eps * float(wanted.abs().max())
        torch.testing.assert_close(after[key].double(), wanted, rtol=0, atol=within)
    assert len(kinds) > 1
    assert verify_against_base(tmp_path / "out", str(base)).passed


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((PRUNE.model_copy(update=RIDGE),), id="ridge"),
        zoo.full((PRUNE.model_copy(update={"correct": compressor.Correct("tune")}),), id="tune"),
        zoo.full((MERGE.model_copy(update=RIDGE),), id="merge"),
        zoo.full((compressor.Constants(experts=4, correct="ridge"),), id="constants"),
        pytest.param((compressor.Prune(ratio=0, split=2),), id="split"),
        pytest.param((PRUNE, compressor.Quantize("int4", group_size=8)), id="int4"),
        zoo.full((PRUNE, compressor.Distill(steps=2, tokens_per_step=64, sequence_length=32)), id="distill"),
    ],
)
def test_what_steps_leave_alone_keeps_its_digits_and_dtype(steps: tuple[Any, ...], tmp_path: Path) -> None:
    base = save(tmp_path / "in", "qwen3_moe")
    outcome = made(base, tmp_path / "out", *steps)
    result = verify_against_base(tmp_path / "out", str(base))
    assert result.passed, result.faults
    before, after = small.tensors_of(base), small.tensors_of(tmp_path / "out")
    for key in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert after[key].dtype == torch.float32
        assert torch.equal(after[key], before[key]) or key in result.changed
    if isinstance(steps[0], compressor.Prune) and steps[0].split == 1 and "int4" not in str(steps):
        for key, members in sources(outcome, before).items():
            dtypes = {member.dtype for member, _ in members}
            assert after[key].dtype == (dtypes.pop() if len(dtypes) == 1 else torch.float32), key
            if len(members) == 1 and key not in result.changed:
                assert torch.equal(after[key], members[0][0]), key


@pytest.mark.parametrize("steps", [(PRUNE,), (PRUNE.model_copy(update=RIDGE),)], ids=["drop", "ridge"])
def test_fused_storage_keeps_the_dtype_of_each_tensor(steps: tuple[Any, ...], tmp_path: Path) -> None:
    def fused(tensors: Tensors) -> None:
        state = zoo.build("qwen3_moe", vocab_size=small.VOCABULARY).bfloat16().state_dict()
        tensors.clear()
        for name, value in state.items():
            tensors[name] = value.float() * 1.001 if "experts.down" in name else value.clone()

    base = save(tmp_path / "in", "qwen3_moe", fused)
    made(base, tmp_path / "out", *steps)
    dtypes: dict[str, set[torch.dtype]] = {}
    for key, value in small.tensors_of(tmp_path / "out").items():
        if ".experts." in key:
            dtypes.setdefault("down" if "down_proj" in key else "inner", set()).add(value.dtype)
    assert dtypes == {"down": {torch.float32}, "inner": {torch.bfloat16}}
    assert verify_against_base(tmp_path / "out", str(base)).passed


def test_a_slot_in_the_dtype_of_another_expert_is_a_fault(tmp_path: Path) -> None:
    base = save(tmp_path / "in", "qwen3_moe")
    made(base, tmp_path / "out", PRUNE)
    (tmp_path / "out" / "SHA256SUMS").unlink()
    name = "model.layers.1.mlp.experts.0.up_proj.weight"

    def rewritten(tensors: Tensors) -> None:
        other = torch.float16 if tensors[name].dtype != torch.float16 else torch.bfloat16
        tensors[name] = tensors[name].to(other)

    small.edit_tensors(tmp_path / "out", rewritten)
    (fault,) = verify_against_base(tmp_path / "out", str(base)).faults
    assert fault.startswith(f"{name} is ")


KEPT = (1, 2, 5, 7)


def test_plain_experts_among_fp8_ones_are_read_and_keep_what_they_have(tmp_path: Path) -> None:
    base = tmp_path / "in"
    save_fp8(base)
    weights = dequantized(base)

    def some_plain(tensors: Tensors) -> None:
        for name in [name for name in tensors if re.search(r"experts\.[26]\..*weight$", name)]:
            tensors[name] = weights[name].bfloat16()
            del tensors[f"{name}_scale_inv"]

    small.edit_tensors(base, some_plain)
    model = open_model(locate(str(base)), "float32", "cpu")
    model.partial.load(model.partial.empty)
    whole = plain_model(base, torch.float32).state_dict()
    for key, value in model.partial.model.state_dict().items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=0, msg=key)
    layers = tuple(LayerPlan.keep(layer, KEPT) for layer in model.architecture.layers)
    plan = Decided(Source(str(base), None, model.fingerprint), len(KEPT), "by hand", {}, None, layers)
    compressor.apply(by_hand(plan), tmp_path / "out")
    before, after = small.tensors_of(base), small.tensors_of(tmp_path / "out")
    for key in before:
        named = EXPERT.fullmatch(key)
        if named is None or int(named[2]) not in KEPT:
            continue
        module, expert, rest = named.groups()
        value = after.pop(f"{module}.{KEPT.index(int(expert))}.{rest}")
        assert value.dtype == before[key].dtype and torch.equal(value.float(), before[key].float()), key
    assert not any(map(EXPERT.fullmatch, after))
    assert verify_against_base(tmp_path / "out", str(base)).passed
    smaller = plain_model(tmp_path / "out", torch.float32).state_dict()
    key = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(smaller[key], whole[key][[*KEPT]])


@pytest.mark.parametrize("frag", [pytest.param(".experts.3.", id="an-expert"), zoo.full("", id="whole")])
def test_float64_is_kept_where_nothing_changes_and_computed_in_float32(frag: str, tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors.update({name: value.double() for name, value in tensors.items() if frag in name})

    base = save(tmp_path / "in", "qwen3_moe", widen)
    if not frag:
        small.edit_json(base / "config.json", lambda config: config.update(dtype="float64"))
    made(base, tmp_path / "out", PRUNE)
    assert verify_against_base(tmp_path / "out", str(base)).passed
    made(base, tmp_path / "int8", PRUNE, compressor.Quantize("int8"))
    rounded = load_whole(tmp_path / "int8", dtype=torch.float32).state_dict()
    for key, value in load_whole(tmp_path / "out", dtype=torch.float32).state_dict().items():
        apart = (value - rounded[key]).abs().max()
        assert apart <= (value.abs().max() / 127 if ".experts." in key else 0), key
