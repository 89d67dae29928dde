import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from safetensors.torch import load_file

from compressor import memory
from compressor.answers import streamed
from compressor.answers.lm_eval_adapter import lm_eval_model
from compressor.answers.lm_eval_run import TaskEvaluation, plan_evaluation, streams
from compressor.answers.stock import HEADROOM, weight_bytes
from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.progress import Silent
from tests.support import small, zoo
from tests.support.audit import paths_of
from tests.support.eval_tasks import Steps, no_network, own_tasks, written_task
from tests.support.machine import leave_memory
from tests.support.zoo_configs import FAMILIES

STREAMED = ("gpt_oss", "qwen3_next", "granitemoe")  # a window of 8; linear attention; logits scaled after the head
CHOICES = [(f"{n} and {n * n}:", answer) for n in range(5) for answer in (" a", " b", " both of them", " a b")]
ODD = [("", "abc"), ("ends in blanks  ", "x"), ("z" * 90, " cut on the left"), ("one", "y" * 40)]
TEXTS = ["a short text", "a long one " * 20, "b"]  # the second has four windows


def options(**settings: Any) -> EvaluationOptions:
    return EvaluationOptions(tasks=("sums",), device="cpu", dtype="float32", **settings)


def requests(kind: str, arguments: list[tuple[str, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


def answered(model: Any) -> tuple[list[tuple[float, bool]], list[float]]:
    model.watch("sums", Silent())
    choices = model.loglikelihood(requests("loglikelihood", CHOICES + ODD))
    return choices, model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]))


@pytest.mark.parametrize("family", zoo.sweep(STREAMED))
def test_answers_are_those_of_the_model_in_memory(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small.save(tmp_path / "model", family)
    source = locate(str(folder))
    with lm_eval_model(source, options()) as stock:
        choices, texts = answered(stock)
    for settings in ({}, {"batch_size": 3}):
        streaming = lm_eval_model(source, options(**settings), streamed=True)
        with paths_of("tempfile.mkstemp") as spilled, streaming as model:
            found = answered(model)
            assert all(value.device.type == "meta" for value in model.model.model.partial.model.parameters())
        assert [answer[0] for answer in found[0]] == pytest.approx([answer[0] for answer in choices], abs=1e-4)
        assert [answer[1] for answer in found[0]] == [answer[1] for answer in choices]
        assert found[1] == pytest.approx(texts, rel=1e-5)
        monkeypatch.setattr(streamed, "LOGIT_BYTES", 4 * small.VOCABULARY * 20)  # of twenty positions, the second time
        monkeypatch.setattr(streamed, "DEFAULT_ACTIVATION_BUDGET", 4096)
    assert spilled  # which the second run did


def test_the_tokenizer_is_not_read_again_for_each_text(tmp_path: Path) -> None:
    read = list[int]()
    with lm_eval_model(locate(str(small.save(tmp_path / "model"))), options(), streamed=True) as model:
        model.watch("sums", Silent())
        for count in (1, 9):
            texts = [(f"text {number}",) for number in range(count)]
            with paths_of("open", "tokenizer_config.json") as opened:
                model.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
            read.append(len(opened))
    assert 0 < read[1] <= read[0]


def test_the_head_is_shown_what_counts_alone(tmp_path: Path) -> None:
    with lm_eval_model(locate(str(small.save(tmp_path / "model"))), options(), streamed=True) as model:
        ran, head = list[tuple[int, ...]](), list[tuple[int, ...]]()
        stock = model.model.model.partial.model
        stock.get_input_embeddings().register_forward_hook(lambda module, args, out: ran.append(tuple(args[0].shape)))
        stock.get_output_embeddings().register_forward_hook(lambda module, args, out: head.append(tuple(out.shape)))
        model.watch("sums", Silent())
        model.loglikelihood(requests("loglikelihood", CHOICES + ODD))
        of_text = partial(model.tok_encode, add_special_tokens=False)
        pairs = [model._encode_pair(*each) for each in CHOICES + ODD[1:]]
        scored: dict[tuple[int, ...], int] = {}  # by input: positions
        for before, after in [([model.prefix_token_id], of_text(ODD[0][1])), *pairs]:
            tokens = (*before, *after)[-model.max_length - 1 : -1]
            scored[tokens] = max(len(after), scored.get(tokens, 0))
    asked = 5 * 4 + len(ODD)
    # " a" and " b" of one question are predicted by the same tokens
    assert sum(rows for rows, _ in ran) == asked - 5
    positions = sum(positions for _, positions, _ in head)
    assert positions == sum(scored.values()) < sum(rows * length for rows, length in ran)


def test_tasks_are_answered_together_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    own, steps = own_tasks(tmp_path), Steps()
    source = locate(str(small.save(tmp_path / "model", max_position_embeddings=256)))
    wanted = EvaluationOptions(tasks=("both", "moe_demo_text"), limit=4, include_path=own, device="cpu", num_fewshot=1)
    tasks = resolve_tasks(wanted)
    plain = TaskEvaluation(source, tasks, wanted).run(Silent())
    found = TaskEvaluation(source, tasks, wanted, streamed=True).run(steps)
    assert found["both"].items == plain["both"].items
    assert found["moe_demo_text"].values == pytest.approx(plain["moe_demo_text"].values, rel=1e-5)
    assert {scores.streamed for scores in found.values()} == {True}
    layers = 2 * FAMILIES["mixtral"].config["num_hidden_layers"]  # once for choices, once for texts
    assert (len(steps.phases), steps.advanced) == (3, 1 + layers)


def test_what_does_not_fit_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, wanted = locate(str(small.save(tmp_path / "model"))), options()
    weights = weight_bytes(source, wanted.dtype)
    tensors = load_file(source.folder / "model.safetensors")
    assert weights == sum(value.numel() for value in tensors.values()) * 4
    assert weight_bytes(source, "bfloat16") == weights // 2
    needed = weights + HEADROOM
    for left, expected in ((None, False), (1.26 * needed, False), (1.24 * needed, True), (0, True)):
        leave_memory(monkeypatch, tmp_path, left)
        assert streams(source, wanted) is expected
        assert streams(source, options(stream=not expected)) is not expected
    written_task(tmp_path)
    for stream in (True, None):
        asks = EvaluationOptions(tasks=("written",), include_path=tmp_path, device="cpu", stream=stream)
        with pytest.raises(CompressionError, match=r"'written' writes its answers.* of model in memory.*--no-stream"):
            plan_evaluation(source, resolve_tasks(asks), asks, tmp_path / "store")


def test_available_is_the_least_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, group = tmp_path / "meminfo", tmp_path / "cgroup"
    machine.write_text("MemTotal:  900 kB\nMemAvailable:  800 kB\n")
    group.write_text("0::/outer/inner\n")
    place = tmp_path / "groups" / "outer" / "inner"
    place.mkdir(parents=True)
    for name, file in (("MACHINE", machine), ("GROUP", group), ("GROUPS", tmp_path / "groups")):
        monkeypatch.setattr(memory, name, file)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory.available() == 800 * 1024
    for folder, most, held, cached in ((place, "max", 5, 0), (place.parent, "700000", 600000, 50000)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{held}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    assert memory.available() == 150_000
    held = memory._field(memory.STATUS, "VmSize")
    assert held is not None
    limits = {resource.RLIMIT_AS: held + 1000}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY),) * 2)
    assert memory.available() is not None and memory.available() <= 1000
