"""The rules of servers, against the conditions as their sources write them, and against every number tried in turn."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.model.opened import served_model
from compressor.model.serving import SERVERS, Served, advise, broken, servers_in_words
from tests.support import small, zoo
from tests.support.command_line import Run
from tests.support.opened_models import opened

WIDE = Served("mixtral", 64, 2, 1024)
DEEPSEEK = Served("deepseek_v3", 256, 8, 2048, groups=8, chosen_groups=4, selection_bias=True, quantization="fp8")


def against(model: Served) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for breach in advise(model).breaches:
        found.setdefault(breach.server, []).append(breach.says)
    return found


@given(st.integers(1, 1500), st.integers(1, 16), st.integers(1, 4000))
def test_conditions_are_those_of_the_sources(experts: int, top_k: int, width: int) -> None:
    model = replace(WIDE, experts=experts, top_k=top_k, width=width)
    power = bin(experts).count("1") == 1
    expected = set()
    if not (power and experts <= 512) and experts not in (192, 320, 384, 448, 576):
        expected.add(("vLLM", "experts"))
    if any(experts % size for size in (2, 4, 8) if size <= experts):
        expected.add(("SGLang", "experts"))
    if experts > 512 or not power:
        expected.add(("aiter", "experts"))
    if experts > 1024 or ((not power or experts > 512) and experts not in (288, 576)):
        expected.add(("llama.cpp", "experts"))
    if width % 128:
        expected |= {("vLLM", "width"), ("SGLang", "width")}
    if width % 256:
        expected.add(("llama.cpp", "width"))
    assert {(rule.server, rule.about) for rule in broken(model)} == expected
    assert set(advise(model).full_speed) == set(SERVERS) - {server for server, _ in expected}


@given(st.integers(2, 300), st.integers(1, 9), st.integers(1, 8), st.booleans())
def test_the_nearest_number_is_that_of_a_search(experts: int, top_k: int, groups: int, bias: bool) -> None:
    model = Served("deepseek_v3", experts, top_k, 512, groups=groups, chosen_groups=groups, selection_bias=bias)
    counts = [count for count in range(top_k, 300) if count % groups == 0]
    suits = [
        count
        for count in counts
        if not [rule for rule in broken(replace(model, experts=count)) if rule.about == "experts"]
    ]
    found = advise(model, counts).nearest
    if not [rule for rule in broken(model) if rule.about == "experts"]:
        assert found == experts
    elif not suits:
        assert found is None
    else:
        assert found in suits and abs(found - experts) == min(abs(count - experts) for count in suits)
        assert experts + abs(found - experts) not in suits or found > experts  # of two the larger


WIDE_48, KERNEL = replace(WIDE, experts=48), "routes among 48 experts by a slower kernel"
CUT = "cuts FP8 blocks of {} with tensor parallelism over {} GPUs (over {} it can)"
FOURTH = Served("deepseek_v4", 160, 6, 2048, selection_bias=True)
OSS = Served("gpt_oss", 28, 4, 2880, quantization="mxfp4")
EXAMPLES = [
    (WIDE_48, "vLLM", KERNEL), (WIDE_48, "aiter", KERNEL),
    (WIDE_48, "llama.cpp", "routes among 48 experts by slower kernels on CUDA"),
    (replace(WIDE, experts=2048), "llama.cpp", "loads no more than 1,024 experts a layer"),
    (replace(DEEPSEEK, experts=132), "vLLM", "chooses among 132 experts without their routing groups, in silence"),
    (replace(DEEPSEEK, experts=132), "llama.cpp", "refuses 132 experts in this many routing groups"),
    (replace(DEEPSEEK, experts=132), "SGLang",
     "cannot spread 132 experts over 8 GPUs with expert parallelism (over 2 and 4 it can)"),
    (replace(DEEPSEEK, experts=8, top_k=2), "llama.cpp", "refuses 8 experts in this many routing groups"),  # one each
    (replace(DEEPSEEK, experts=130), "FlashInfer", "takes no 130 experts in its FP8 kernel"),
    (replace(DEEPSEEK, top_k=16), "FlashInfer", "takes no top-16 of 256 experts in its FP8 kernel"),
    (FOURTH, "vLLM", "has no router kernel for 160 experts of DeepSeek-V4 and ends with an error"),
    (OSS, "vLLM", "leaves the last of 28 experts out with expert parallelism over 8 GPUs (over 2 and 4 it can)"),
    (replace(DEEPSEEK, width=1536), "vLLM", CUT.format(128, 8, "2 and 4")),
    (replace(DEEPSEEK, width=1536), "SGLang", CUT.format(128, 8, "2 and 4")),
    (replace(DEEPSEEK, width=192, block=32), "vLLM", CUT.format(32, "4 and 8", 2)),
    (replace(DEEPSEEK, width=192), "vLLM", "refuses experts of 192 neurons in FP8 blocks of 128"),
    (replace(WIDE, experts=3), "SGLang", "cannot spread 3 experts over 2 GPUs with expert parallelism"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "server", "says"), EXAMPLES)
def test_known_examples(model: Served, server: str, says: str) -> None:
    assert says in against(model)[server]


def test_models_that_break_no_rule() -> None:
    assert against(WIDE) == {} == against(DEEPSEEK) == against(replace(WIDE, family="qwen3_moe", tied=True))
    assert against(replace(WIDE, family="olmoe", tied=True)).keys() == {"vLLM", "llama.cpp"}
    # as many as the kernel takes, another quantisation, and a scale for each matrix or row
    for model in (replace(FOURTH, experts=192), replace(DEEPSEEK, width=192, block=0)):
        assert "vLLM" not in against(model)
    assert not any("leaves the last" in says for says in against(replace(OSS, quantization="")).get("vLLM", []))


def test_a_line_names_each_server_once_by_the_worst_that_it_does() -> None:
    advice = advise(Served("mixtral", 45, 2, 96), range(2, 60))
    assert len({breach.server for breach in advice.breaches}) < len(advice.breaches)
    assert servers_in_words(advice) == (
        "at full speed in FlashInfer; can fail in SGLang; slower in vLLM, aiter, llama.cpp "
        "(nearest number for all: 32; see moe-compress inspect)"
    )
    tied = advise(Served("olmoe", 32, 2, 256, tied=True))
    assert "; wrong answers in vLLM; can fail in llama.cpp (see" in servers_in_words(tied)
    assert servers_in_words(advise(Served("mixtral", 32, 2, 256))).endswith("aiter, llama.cpp")


@pytest.mark.parametrize(
    ("family", "groups", "bias", "tied"),
    [
        ("mixtral", (1, 1), False, False), ("gpt_oss", (1, 1), False, False), ("qwen3_moe", (1, 1), False, False),
        ("deepseek_v3", (2, 1), True, False), ("minimax_m2", (1, 1), True, False),
    ],
)  # fmt: skip
def test_a_model_is_seen_as_it_is(family: str, groups: tuple[int, int], bias: bool, tied: bool, tmp_path: Path) -> None:
    stock, model = opened(family, tmp_path)
    seen, experts = served_model(model), next(map(stock.get_submodule, zoo.experts(stock)))
    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    assert (seen.family, seen.experts, seen.top_k, seen.width) == (family, 8, model.architecture.layers[0].top_k, width)
    assert ((seen.groups, seen.chosen_groups), seen.selection_bias, seen.tied) == (groups, bias, tied)


def test_the_commands_say_it_once_in_their_summaries(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", num_local_experts=12, intermediate_size=128)
    arguments: tuple[Any, ...] = ("--experts", 6, "--strategy", "model-centric")
    done = run("plan", model, "-o", tmp_path / "plan.json", *arguments)
    assert "vLLM" not in done.err and done.out.count("Servers: ") == 1, done
    assert "Servers: at full speed in FlashInfer; can fail in SGLang" in done.out
    made = run("compress", model, "-o", tmp_path / "out", *arguments, "--json")
    assert made.err == ""
    summary = json.loads(made.out)
    assert summary["experts"]["after"] == summary["servers"]["experts"] == 6
    assert summary["servers"]["nearest"] == 8 and summary["servers"]["full_speed"] == ["FlashInfer"]
    shown = run("inspect", model, "--experts", 6)
    assert "nearest to 12: 8; nearest to 6: 8" in shown.out


def test_a_split_is_judged_by_its_own_numbers(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", num_local_experts=8, intermediate_size=256)
    done = run("split", model, "-o", tmp_path / "out", "--parts", 4)
    assert done.status == 0 and "WARNING" not in done.err
    assert "Servers: at full speed in FlashInfer, aiter" in done.out


@pytest.mark.usefixtures("hasty")
def test_rows_that_the_default_does_not_take_are_named_with_what_runs(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    zoo.build("mixtral", vocab_size=small.VOCABULARY, intermediate_size=56).to(torch.bfloat16).save_pretrained(model)
    small.tokenizer().save_pretrained(model)
    refused = run("split", model, "-o", tmp_path / "out", "--parts", 3)
    assert refused.status == 2 and refused.err.rstrip().endswith("equal parts; give one of 7")
    text = small.text_file(tmp_path)
    done = run("compress", model, "-o", tmp_path / "out", "--split", 2, "--ratio", 0.25, "--calibration", text)
    assert done.status == 0 and 'experts_implementation="eager"' in " ".join(done.out.split()), done
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["experts_implementation"] == "eager"
    assert record["config_fields"] == {"num_local_experts": 12, "intermediate_size": 28, "num_experts_per_tok": 4}
