"""Plans from the files of other tools, each written here as that tool writes it."""

import base64
import io
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from compressor.recipe.steps_plan import Plan
from tests.support import small
from tests.support.command_line import Run, refused, succeeded

KEPT = {0: [1, 3, 4, 6], 1: [0, 2, 5, 7]}


def razor(path: Path) -> None:
    tagged = {f"main_{layer}": {"keep": experts} for layer, experts in KEPT.items()}
    path.write_text(json.dumps({**tagged, "mtp_0": [0, 1, 2, 3]}))


def ascend(path: Path) -> None:
    path.write_text("".join(json.dumps({str(layer): experts[::-1]}) + "\n" for layer, experts in KEPT.items()))


def reap(path: Path) -> None:
    saliency = {layer: torch.zeros(8).index_fill(0, torch.tensor(experts), 1) for layer, experts in KEPT.items()}
    torch.save({layer: {"reap": value, "total_tokens": torch.tensor(9)} for layer, value in saliency.items()}, path)


def counts() -> torch.Tensor:
    """Tokens routed to each expert [3 steps, 2 layers, E] of which those to keep get most."""
    drawn = torch.randint(0, 5, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    for layer, experts in KEPT.items():
        drawn[:, layer, experts] += torch.tensor([9, 8, 7, 6])
    return drawn


def sglang(path: Path) -> None:
    torch.save({"rank": 0, "logical_count": counts().int(), "average_utilization_rate_over_window": None}, path)


def sglang_passes(path: Path) -> None:
    place = torch.tensor([[*range(8), 1, 4], [7, *range(8), 5]])  # of ten physical experts
    physical = torch.zeros(3, 2, 10, dtype=torch.int32)
    for step, layer, expert in product(range(3), range(2), range(8)):
        copies = (place[layer] == expert).nonzero().flatten().tolist()
        for token in range(int(counts()[step, layer, expert])):
            physical[step, layer, copies[token % len(copies)]] += 1
    records = [{"forward_pass_id": step, "global_physical_count": each} for step, each in enumerate(physical)]
    torch.save({"records": records, "last_physical_to_logical_map": place}, path)


def imatrix(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "imatrix")
    for layer, numbers in enumerate(counts().sum(0)):
        writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight.counts", numbers.float()[:, None].numpy())
        writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight.in_sum2", torch.rand(8, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def response(chosen: np.ndarray) -> dict[str, Any]:
    """A response of vLLM by ids of experts [tokens, layers, top_k]."""
    content = io.BytesIO()
    np.save(content, chosen)
    encoded = base64.b64encode(content.getvalue()).decode()
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "routed_experts": encoded}]}


def vllm(path: Path) -> None:
    """Responses of 40 tokens to which 4 of the 8 experts answer, and a last layer without experts."""
    draw = np.random.default_rng(0)
    lines = [{"choices": [{"index": 0, "text": "", "routed_experts": None}]}]
    for kind in (np.uint8, np.int32):
        chosen = np.zeros((40, 3, 2), dtype=kind)
        for token, (layer, experts) in product(range(40), KEPT.items()):
            other = draw.choice([expert for expert in range(8) if expert not in experts])
            chosen[token, layer] = draw.choice(experts, 2, replace=False) if token % 4 else (experts[0], other)
        lines.append(response(chosen))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def vllm_of_one(path: Path) -> None:
    """A response of a model whose tokens go to one expert each, or in its last layer to none."""
    order = [*KEPT[0] * 3, *KEPT[1], 0]
    chosen = np.array([[[expert], [KEPT[1][number % 4]], [0]] for number, expert in enumerate(order)], dtype=np.uint8)
    path.write_text(json.dumps(response(chosen)))


LISTS = [(razor, "kept_expert_indices.json"), (ascend, "experts.jsonl")]
SCORES = [
    (reap, "observations.pt"),
    (sglang, "recorded.pt"),
    (sglang_passes, "passes.pt"),
    (imatrix, "imatrix.gguf"),
    (vllm, "responses.jsonl"),
    (vllm_of_one, "response.json"),
]


@pytest.mark.parametrize(("write", "name"), [*LISTS, *SCORES])
def test_the_experts_of_a_list_stay(write: Callable[[Path], None], name: str, run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "qwen3_moe")
    write(tmp_path / name)
    number = ("--set", "prune.experts=4") if (write, name) in SCORES else ()
    command = ("plan", model, "-o", tmp_path / "plan.json", "--from", tmp_path / name, *number)
    refused(run(*command, "--strategy", "reap"), f"{name} says which experts stay, and so would the strategy")
    succeeded(run(*command))
    plan = Plan.load(tmp_path / "plan.json").expert_plan
    assert {layer.layer: [group.members[0] for group in layer.groups] for layer in plan.layers} == KEPT
    succeeded(run("apply", tmp_path / "plan.json", "-o", tmp_path / "out"))
    before, after = small.tensors_of(model), small.tensors_of(tmp_path / "out")
    for layer, kept in KEPT.items():
        rows = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(after[rows], before[rows][kept])


def test_files_that_are_no_lists_are_refused(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "qwen3_moe")
    header = b"{'descr': ("
    damaged = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    cut = {"choices": [{"routed_experts": base64.b64encode(damaged).decode()}]}
    bad = {
        "text.json": (lambda path: path.write_text("{"), "text.json is not valid JSON"),
        "none.json": (lambda path: path.write_text("{}"), "none.json lists no experts"),
        "uneven.json": (
            lambda path: path.write_text('{"0": [1, 2, 4], "1": [1, 6]}'),
            "keeps 2 to 3 experts.*--experts N.*constants",
        ),
        "other.json": (lambda path: path.write_text('{"0": [1, 2, 9]}'), "list for layer 0 is .*, and 3 of 8 experts"),
        "noise.pt": (lambda path: path.write_bytes(b"noise"), "noise.pt holds no scores of experts"),
        "scores.pt": (reap, "scores.pt scores all experts; say how many"),
        "absent.pt": (lambda path: None, "absent.pt cannot be read"),
        "narrow.pt": (
            lambda path: torch.save({"logical_count": counts()[:, :, :4]}, path),
            "has 8 experts, and 4 are scored",
        ),
        "nan.pt": (
            lambda path: torch.save({"logical_count": counts() * torch.nan}, path),
            "nan.pt is no dump .*finite",
        ),
        "number.pt": (lambda path: torch.save({"logical_count": 3}, path), "number.pt is no dump of SGLang's recorder"),
        "far.pt": (
            lambda path: torch.save({"records": [], "last_physical_to_logical_map": torch.tensor([[2**40]])}, path),
            "far.pt is no dump of SGLang's recorder .*expert 1099511627776",
        ),
        "few.jsonl": (vllm, "few.jsonl scores all experts; say how many"),
        "aborted.json": (
            lambda path: path.write_text('{"choices": [{"routed_experts": null}]}'),
            "no response in .*aborted.json has routed_experts; start vLLM with",
        ),
        "sglang.json": (
            lambda path: path.write_text('{"choices": [{"routed_experts": "AAAAAAEAAAA="}]}'),
            "sglang.json: its routed_experts cannot be read .*start vLLM with",
        ),
        "negative.json": (
            lambda path: path.write_text(json.dumps(response(np.full((1, 2, 2), -1)))),
            "negative.json: its routed_experts cannot be read .*no expert",
        ),
        "cut.json": (
            lambda path: path.write_text(json.dumps(cut)),
            "cut.json: its routed_experts cannot be read .*start vLLM with",
        ),
        "deep.json": (
            lambda path: path.write_text(json.dumps(response(np.zeros((0, 5000, 2), dtype=np.uint8)))),
            "deep.json: its routed_experts cannot be read .*layers",
        ),
        "both.jsonl": (
            lambda path: path.write_text(f'{{"0": [1, 2]}}\n{json.dumps(response(np.array([[[1, 2]]])))}\n'),
            "both.jsonl holds lists beside responses",
        ),
        "noise.gguf": (lambda path: path.write_bytes(b"noise"), "noise.gguf cannot be read as GGUF"),
    }
    for name, (write, message) in bad.items():
        write(tmp_path / name)
        number = ("--experts", 4) if name == "narrow.pt" else ()
        refused(run("plan", model, "-o", tmp_path / "plan.json", "--from", tmp_path / name, *number), message)
        assert not (tmp_path / "plan.json").exists()


def test_of_several_files_the_experts_stay_that_rank_high_in_any(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "qwen3_moe")
    lists = {"code.json": {"0": [5, 1, 2], "1": [0, 1, 2]}, "chats.json": {"0": [7, 5, 1], "1": [4, 5, 2]}}
    named = []
    for name, content in lists.items():
        (tmp_path / name).write_text(json.dumps(content))
        named += ["--from", tmp_path / name]
    refused(run("plan", model, "-o", tmp_path / "plan.json", *named), "these lists together keep 4 to 5 experts")
    succeeded(run("plan", model, "-o", tmp_path / "plan.json", *named, "--experts", 4))
    plan = Plan.load(tmp_path / "plan.json").expert_plan
    kept = {layer.layer: [group.members[0] for group in layer.groups] for layer in plan.layers}
    assert kept == {0: [1, 2, 5, 7], 1: [0, 1, 2, 4]}  # in both lists, then in the first
