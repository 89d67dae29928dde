from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from compressor.answers.onnx import Continuation, OnnxDecoder, OnnxModel, onnx_decoder, providers  # noqa: E402
from compressor.answers.options import GenerationOptions  # noqa: E402
from compressor.answers.prompts import Prompt  # noqa: E402
from compressor.checkpoint.source import locate  # noqa: E402
from compressor.errors import CompressionError  # noqa: E402
from compressor.progress import Silent  # noqa: E402
from tests.support import small  # noqa: E402
from tests.support.audit import paths_of  # noqa: E402

VOCABULARY, HIDDEN, POSITIONS, NEW = small.VOCABULARY, 6, 64, 10
KEY, VALUE = ("past_key_values.0.key", "present.0.key"), ("past_key_values.0.value", "present.0.value")
OTHER = (("past_conv.0", "present_conv.0"), ("input.layers.0.sum", "output.layers.0.sum"))
TYPES = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def weights() -> dict[str, Tensor]:
    """Whole numbers, so that half precision holds all sums of them exactly."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (HIDDEN, VOCABULARY), "place": (POSITIONS, VOCABULARY)}
    shapes |= {"tail": (HIDDEN, VOCABULARY), "seen": (1, VOCABULARY)}
    return {name: torch.randint(-3, 4, shape, generator=generator).float() for name, shape in shapes.items()}


def expected(tokens: list[int]) -> Tensor:
    """[S] -> [V]: the same logits from all tokens at once."""
    w = weights()
    total = sum(w["embedding"][token] for token in tokens)
    return total @ (w["head"] + w["tail"]) + w["place"][len(tokens) - 1] + len(tokens) * w["seen"][0]


def graph(cached: bool, kind: str = "float", names: tuple[tuple[str, str], ...] = (KEY, VALUE)) -> Any:
    """A decoder: a running sum of embeddings, kept token by token in one cache and as a sum in another."""
    element = TYPES[kind]
    (key, key_out), (value, value_out) = names
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    node, info = helper.make_node, helper.make_tensor_value_info
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["new"]),  # [B, S, H]
        node("CumSum", ["new", "one"], ["running"]),
        node("ReduceSum", ["new", "one"], ["added"], keepdims=1),  # [B, 1, H]
    ]
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "seq"])]
    inputs += [info("attention_mask", TensorProto.INT64, ["batch", "total"])]
    inputs += [info("position_ids", TensorProto.INT64, ["batch", "seq"])]
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "seq", VOCABULARY])]
    if cached:
        nodes += [
            node("Cast", ["new"], ["stored"], to=element),
            node("Concat", [key, "stored"], [key_out], axis=1),
            node("Cast", [key], ["kept"], to=TensorProto.FLOAT),
            node("ReduceSum", ["kept", "one"], ["earlier"], keepdims=1),
            node("Add", ["running", "earlier"], ["sums"]),
            node("Cast", [value], ["state"], to=TensorProto.FLOAT),
            node("Add", ["state", "added"], ["everything"]),
            node("Cast", ["everything"], [value_out], to=element),
        ]
        inputs += [info(key, element, ["batch", "past", HIDDEN]), info(value, element, ["batch", 1, HIDDEN])]
        outputs += [info(key_out, element, ["batch", "total", HIDDEN]), info(value_out, element, ["batch", 1, HIDDEN])]
    else:
        nodes += [node("Identity", ["running"], ["sums"]), node("Identity", ["added"], ["everything"])]
    nodes += [
        node("MatMul", ["sums", "head"], ["a"]),
        node("MatMul", ["everything", "tail"], ["b"]),
        node("Gather", ["place", "position_ids"], ["c"]),
        node("ReduceSum", ["attention_mask", "one"], ["count"], keepdims=1),
        node("Cast", ["count"], ["length"], to=TensorProto.FLOAT),
        node("MatMul", ["length", "seen"], ["d"]),  # [B, V]
        node("Sum", ["a", "b", "c", "d"], ["logits"]),
    ]
    constants = [one, *(numpy_helper.from_array(value.numpy(), name) for name, value in weights().items())]
    made = helper.make_graph(nodes, "decoder", inputs, outputs, constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def session(model: Any) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def export(folder: Path, model: Any, **generation: Any) -> Path:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    small.tokenizer(small.CHAT).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "mixtral", "vocab_size": 259, "max_position_embeddings": 64}')
    (folder / "generation_config.json").write_text("{}")
    small.edit_json(folder / "generation_config.json", lambda content: content.update(generation))
    return folder


def reference(prompt: list[int], stops: frozenset[int] = frozenset()) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < NEW and not stops & set(tokens):
        tokens.append(int(expected([*prompt, *tokens]).argmax()))
    return tokens


class Spy:
    def __init__(self, inner: Any) -> None:
        self._inner, self.lengths = inner, list[int]()
        self.get_inputs, self.get_outputs = inner.get_inputs, inner.get_outputs

    def run_with_ort_values(self, names: list[str], fed: dict[str, Any]) -> Any:
        self.lengths.append(fed["input_ids"].shape()[1])
        return self._inner.run_with_ort_values(names, fed)


def continued(session: Any, prompt: list[int]) -> list[int]:
    options = GenerationOptions(max_new_tokens=NEW)
    running = Continuation(OnnxDecoder(session), small.tokenizer(), options, frozenset(), tuple(prompt))
    list(running)
    return running.tokens


@pytest.mark.parametrize("kind", [*sorted(TYPES), None])
@pytest.mark.parametrize("names", [(KEY, VALUE), OTHER])
def test_caches_of_any_name_layout_and_dtype_or_none(kind: str | None, names: tuple[tuple[str, str], ...]) -> None:
    spy = Spy(session(graph(cached=kind is not None, kind=kind or "float", names=names)))
    prompt = [5, 9, 200, 44]
    assert continued(spy, prompt) == reference(prompt)
    assert spy.lengths == (list(range(4, 4 + NEW)) if kind is None else [4] + [1] * (NEW - 1))


@pytest.mark.parametrize("cached", [True, False])
def test_logits_are_those_of_the_last_token(cached: bool) -> None:
    decoder = OnnxDecoder(session(graph(cached)))
    for seen, fresh in (([], [7, 8, 9]), ([7, 8, 9], [1]), ([7, 8, 9, 1], [250, 3])):
        logits = decoder(fresh)
        assert logits.dtype == torch.float32 and torch.equal(logits, expected([*seen, *fresh]))


def test_a_folder_is_continued_and_its_end_token_obeyed(tmp_path: Path) -> None:
    tokenizer = small.tokenizer()
    prompt = tokenizer("né 1")["input_ids"]
    free = reference(prompt)
    stop = next(token for token in free if token != free[0])
    folder = export(tmp_path / "out", graph(cached=True), eos_token_id=[stop])
    model = OnnxModel(locate(str(folder)))
    running = model.continuation(Prompt.of("né 1"), GenerationOptions(max_new_tokens=NEW))
    text = "".join(running)
    assert running.tokens == reference(prompt, frozenset({stop})) and running.stopped == "end"
    assert text == tokenizer.decode(running.tokens[:-1], skip_special_tokens=True)
    ((_, answer),) = model.complete([(Prompt.of("né 1"), 3)], GenerationOptions(max_new_tokens=NEW), Silent())
    assert (answer.text, answer.tokens, answer.ended, answer.seed) == (text, tuple(running.tokens), "end", 3)


def test_each_request_is_answered_anew_by_files_that_are_read_once(tmp_path: Path) -> None:
    folder, tokenizer = export(tmp_path / "out", graph(cached=True), eos_token_id=[]), small.tokenizer()
    texts = ["né 1", "two", "né 1"]
    with paths_of("open", "tokenizer_config.json") as opened:
        model = OnnxModel(locate(str(folder)))
        asked = [(Prompt.of(text), seed) for seed, text in enumerate(texts)]
        answers = dict(model.complete(asked, GenerationOptions(max_new_tokens=NEW), Silent()))
        several = len(opened)
        dict(model.complete(asked[:1], GenerationOptions(max_new_tokens=NEW), Silent()))
    stops = frozenset({tokenizer.eos_token_id})
    expected = [tuple(reference(tokenizer(text)["input_ids"], stops)) for text in texts]
    assert [answers[number].tokens for number in range(3)] == expected
    assert len(opened) == 2 * several > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("input_ids", "tokens", "has no input 'input_ids' or no output 'logits'"),
        ("logits", "scores", "has no input 'input_ids' or no output 'logits'"),
        ("present.0.key", "kept.0.key", "feed its input 'past_key_values.0.key' with"),
    ],
)
def test_graphs_that_are_no_decoders_are_refused(old: str, new: str, message: str) -> None:
    model = graph(cached=True)
    for entry in (*model.graph.input, *model.graph.output):
        entry.name = new if entry.name == old else entry.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    with pytest.raises(CompressionError, match=message):
        OnnxDecoder(session(model))


def test_files_that_cannot_be_read_or_run(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", graph(cached=False))
    with pytest.raises(CompressionError, match="cannot be run"):  # the graph has 64 positions
        list(OnnxModel(locate(str(folder))).continuation(Prompt.of("x" * 65), GenerationOptions(max_new_tokens=1)))
    (folder / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CompressionError, match=r"ONNX Runtime cannot read .*model\.onnx: "):
        onnx_decoder(folder, "auto")


def test_devices_become_execution_providers() -> None:
    cpu, cuda = "CPUExecutionProvider", "CUDAExecutionProvider"
    assert providers("auto", [cpu]) == providers("cpu", [cuda, cpu]) == [cpu]
    assert providers("auto", [cuda, cpu]) == [(cuda, {"device_id": 0}), cpu]
    assert providers("cuda:1", [cuda, cpu]) == [(cuda, {"device_id": 1}), cpu]
    with pytest.raises(CompressionError, match="needs onnxruntime-gpu"):
        providers("cuda", [cpu])
    with pytest.raises(CompressionError, match="no device 'tpu'"):
        providers("tpu", [cpu])
