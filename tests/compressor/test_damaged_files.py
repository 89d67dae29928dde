"""Mutated files of strangers: whatever lies in them, they are read, or refused by a `CompressionError` of one sentence.

What is accepted is carried on as a command would carry it: written again, and shown in every medium.
"""

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from compressor.answers.items import item_lines, read_items
from compressor.comoe.layer import FACTS, TENSORS, inject, load_adapters, save_adapters
from compressor.comoe.options import ComoeConfig
from compressor.document.markdown import markdown
from compressor.document.terminal import show
from compressor.errors import CompressionError
from compressor.quality_gate.report import gate_blocks, gate_json, junit, read_gate
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.recipe import recipe_of_plan, recipe_yaml
from compressor.recipe.steps_plan import Plan
from compressor.report.data import report_data
from compressor.report.page import hubs as hub_blocks
from compressor.report.page import page
from compressor.steps.prune.planning import given_protected
from tests.compressor.recipe.test_plan import moe_layer
from tests.support import gate_results
from tests.support.plans import Decided, by_hand, pruned

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**63, 0.5, 1.7e308, -1.7e308, float("inf"),
    -float("inf"), float("nan"), "", "0", "NaN", "\ud800", "[/b]", "\x1b[31m\u202e", "a\x00b", "x" * 300, "x" * 5000,
    "../..", "/", [], {}, [1], [[]], [None], ["\udfff"], {"a": 1}, {"[/b]": []},
)  # fmt: skip
UNSEEN = frozenset("\x1b\x07\u202e\u2066")
HUB = {
    "module": "model.layers.0.mlp.experts", "layer": 0, "expert": 2, "influence": 3.2, "aarv": 40.0,
    "influence_score": 7.0, "aarv_score": 5.5, "share": 0.3,
}  # fmt: skip
ITEM = {"prompt": "prompt 0", "answer": "yes", "choices": ["yes", "no"], "task": "task"}
HUBS = [HUB, {**HUB, "expert": 5, "layer": 1, "module": "model.layers.1.mlp.experts"}]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value within some JSON."""
    yield path
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, entry in entries:
        yield from places(entry, (*path, name))


def changed(content: Any, path: tuple[Any, ...], kind: str, odd: Any) -> Any:
    """The JSON with one value replaced, taken out, named otherwise or given twice."""
    if not path:
        return odd if kind == "replace" else content
    made = copy.deepcopy(content)
    owner = made
    for step in path[:-1]:
        owner = owner[step]
    last = path[-1]
    if kind == "remove":
        del owner[last]
    elif kind == "twice" and isinstance(owner, list):
        owner.insert(last, copy.deepcopy(owner[last]))
    elif kind == "rename" and isinstance(owner, dict) and isinstance(odd, str):
        owner[odd] = owner.pop(last)
    else:
        owner[last] = odd
    return made


@st.composite
def mutated(draw: st.DrawFn, original: Callable[[], Any]) -> bytes:
    """The JSON text of `original` with up to three faults in its values, and now and then one in its bytes."""
    content = copy.deepcopy(original())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(content))))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "rename", "twice"]))
        content = changed(content, path, kind, draw(st.sampled_from(ODD)))
    raw = json.dumps(content).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.sampled_from([b"", b"\xff", b"\x00"])) + raw[at + 1 :]
    return raw


REFUSALS = list[str]()  # every sentence that a file was refused with


@contextlib.contextmanager
def only_sentences() -> Iterator[None]:
    """Nothing leaves but a `CompressionError` of letters that can be seen."""
    try:
        yield
    except CompressionError as error:
        message = str(error)
        REFUSALS.append(message)
        assert message and all(letter.isprintable() or letter in "\n\t\xa0" for letter in message), message


@contextlib.contextmanager
def folder_with(**files: bytes | str) -> Iterator[Path]:
    """A folder with these files, whose names have dots for double underscores."""
    with tempfile.TemporaryDirectory() as place:
        for name, content in files.items():
            path = Path(place) / name.replace("__", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield Path(place)


@cache
def plan() -> dict[str, Any]:
    merged = LayerPlan.of(moe_layer(0), [Group((0, 1), (0.5, 0.5), (0.5, 0.5), 1.5, 0), Group.single(2)])
    dropping = LayerPlan.keep(moe_layer(1), [0, 5], figures={"correction": {"heldout_error": 0.5}, "cost": {"a": 1.0}})
    made = Decided(
        Source("folder", None, "f" * 64), 2, "by-hand", {"linkage": "average"},
        {"source": "texts.jsonl", "sha256": "ab", "samples": 8, "seed": 0, "sources": [{"source": "a", "weight": 1.0}]},
        (merged, dropping), correction={"method": "tune", "steps": 3, "tokens": 5, "rate": 0.1, "dtype": "float32"},
        protected={merged.module: (2,)},
    )  # fmt: skip
    content: dict[str, Any] = json.loads(replace(by_hand(made), versions={"torch": "2"}).to_json())
    text = {"source": "more.txt", "sha256": "cd", "samples": 8, "seed": 0}
    curve = [{"step": step, "kl": 0.3 - step / 100, "loss": 2.0, "training": {}} for step in (0, 9)]
    rounds = [{"ridge": 0.01, "step": 1.5, "gain": 0.05, "standard_error": 0.004}]
    content["steps"] += [
        {"name": "routers", "options": {"rounds": 1}, "text": text, "result": {
            "before": 0.4, "after": 0.36, "taken": "router", "steps": rounds}},
        {"name": "distill", "options": {"steps": 9}, "text": text, "result": {
            "changed": True, "before": 0.36, "after": 0.2, "best": 9, "ended": "all steps are done", "curve": curve}},
    ]  # fmt: skip
    return content


@cache
def compression() -> dict[str, Any]:
    return {
        "tool": "moe-compressor", "versions": {"torch": "2"}, "parameters": {"before": 2000, "after": 1000},
        "bytes": {"before": 8000, "after": 4000}, "left_out": ["mtp"], "zeroed_fields": ["n"], "plan_digest": "ab",
        "experts": {"before": 8, "after": 4}, "config_fields": {}, "plan": plan(),
    }  # fmt: skip


@cache
def gate() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gate_json(gate_results.mixed()))
    return found


def shown(blocks: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show(blocks)
    for text in (printed.getvalue(), markdown(blocks)):
        assert not set(text) & UNSEEN, "raw control characters"
        text.encode()


def pruned_otherwise(**changes: Any) -> dict[str, Any]:
    content = copy.deepcopy(plan())
    pruned(content).update(changes)
    return content


@given(mutated(plan))
@example(json.dumps({**plan(), "dtype": []}).encode())
@example(json.dumps(pruned_otherwise(layers=[{**pruned(plan())["layers"][0], "experts": 10**12}])).encode())
@example(json.dumps({**plan(), "steps": [{**plan()["steps"][0], "options": {"strategy": "\ud800"}}]}).encode())
def test_plan(raw: bytes) -> None:
    with folder_with(plan__json=raw) as folder, only_sentences():
        made = Plan.load(folder / "plan.json")
        assert Plan.from_dict(json.loads(made.to_json().encode())).digest() == made.digest()
        recipe_yaml(recipe_of_plan(made))


@given(mutated(lambda: HUBS))
def test_hubs(raw: bytes) -> None:
    record = json.dumps(compression())
    with folder_with(hubs__json=raw, compression__json=record) as folder:
        with only_sentences():
            given_protected(folder / "hubs.json", [moe_layer(0), moe_layer(1)], 8)
        with only_sentences():
            data = report_data(folder, hubs=folder / "hubs.json")
            shown(hub_blocks(data))
            page(data, ())
            json.loads(data.to_json())


@given(mutated(gate))
def test_gate(raw: bytes) -> None:
    with folder_with(gate__json=raw) as folder, only_sentences():
        result = read_gate(folder)
        gate_json(result)
        assert not set(junit(result).decode()) & UNSEEN, "raw control characters"
        shown(gate_blocks(result))


@given(mutated(lambda: ITEM))
def test_item(raw: bytes) -> None:
    with folder_with(items__jsonl=raw + b"\n" + json.dumps(ITEM).encode()) as folder, only_sentences():
        item_lines(read_items(folder / "items.jsonl", strict=True)).encode()


def one_layer() -> nn.Module:
    return nn.ModuleDict({"q_proj": nn.Linear(4, 3)})


@cache
def adapters() -> tuple[dict[str, Any], bytes]:
    with tempfile.TemporaryDirectory() as place:
        save_adapters(inject(one_layer(), ComoeConfig(rank=2, experts=3, targets=("q_proj",))), Path(place) / "made")
        return json.loads((Path(place) / "made" / FACTS).read_text()), (Path(place) / "made" / TENSORS).read_bytes()


@given(mutated(lambda: adapters()[0]))
def test_adapters(raw: bytes) -> None:
    with folder_with(comoe__json=raw, adapters__safetensors=adapters()[1]) as folder, only_sentences():
        loaded = load_adapters(one_layer(), folder)
        assert loaded["q_proj"](torch.ones(2, 4)).isfinite().all()  # type: ignore[index]
        save_adapters(loaded, folder / "again")


SOUND: dict[Callable[[bytes], None], Callable[[], Any]] = {
    test_plan: plan, test_hubs: lambda: HUBS, test_gate: gate, test_item: lambda: ITEM,
    test_adapters: lambda: adapters()[0],
}  # fmt: skip


@pytest.mark.parametrize("test", SOUND, ids=lambda test: test.__name__)
def test_what_is_mutated_is_sound_to_begin_with(test: Callable[[bytes], None]) -> None:
    REFUSALS.clear()
    test.hypothesis.inner_test(json.dumps(SOUND[test]()).encode())  # type: ignore[attr-defined]
    assert not REFUSALS
