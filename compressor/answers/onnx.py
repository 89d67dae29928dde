"""An ONNX export in ONNX Runtime, which continues a prompt token by token.

Names, shapes and dtypes are the graph's own, so that any layout of a cache works. V words of the
vocabulary."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.answers.answering import (
    Answer,
    Ended,
    Model,
    ModelFacts,
    Request,
    Writing,
    answer_of,
    seed_of,
)
from compressor.answers.decoding import choose
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt, tokens_of
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError, reason_of, wrap_faults
from compressor.files import GRAPH
from compressor.frozen import frozen
from compressor.progress import Progress
from compressor.run_record import stamp, versions

logger = logging.getLogger(__name__)

TOKENS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
# of a cache: in -> out
RENAMINGS = (("past_key_values", "present"), ("past", "present"), ("input", "output"))
DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet


class OnnxDecoder:
    """A decoder with caches: new tokens [S] -> logits of the next token, [V] in float32.

    Caches go from one run to the next as they are: no copy, and no dtype that numpy must know.
    """

    def __init__(self, session: Any, rows: int = 1) -> None:
        """Find the caches of so many texts; raises `CompressionError` for a graph that is no
        decoder."""
        self._session = session
        self._inputs = {entry.name: entry for entry in session.get_inputs()}
        outputs = {entry.name for entry in session.get_outputs()}
        if TOKENS not in self._inputs or LOGITS not in outputs:
            raise CompressionError(
                f"{GRAPH} has no input {TOKENS!r} or no output {LOGITS!r}; export a causal "
                "language model"
            )
        self._next = dict[str, str]()  # by input: the output with its next value
        self._caches = dict[str, Any]()  # by input: its value now
        for name, entry in self._inputs.items():
            if name in (TOKENS, MASK, POSITIONS):
                continue
            renamed = [name.replace(old, new, 1) for old, new in RENAMINGS if old in name]
            output = next((candidate for candidate in renamed if candidate in outputs), None)
            if output is None:
                raise CompressionError(
                    f"{GRAPH}: nothing is known to feed its input {name!r} with, and no output "
                    "gives its next value; export the model again"
                )
            # no past before the first token, zeros along axes that are fixed; a name is that of a
            # length that may vary
            shape = [
                size if isinstance(size, int) else rows * (axis == 0 or "batch" in (size or ""))
                for axis, size in enumerate(entry.shape)
            ]
            self._next[name] = output
            self._caches[name] = ort_value(torch.zeros(shape, dtype=DTYPES[entry.type]))
        self._past = 0  # tokens that the caches hold
        self._seen: list[int] = []

    def fresh(self) -> "OnnxDecoder":
        """Return a decoder of the same graph that has seen nothing."""
        return OnnxDecoder(self._session)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._seen.extend(tokens)
        fresh = self._seen[self._past :]  # without a cache all of it is read again
        logits = self.run(torch.tensor([fresh]), torch.ones(1, len(self._seen), dtype=torch.long))
        self._past = len(self._seen) if self._next else 0
        return logits[0, -1].to("cpu", torch.float32, copy=True)

    def run(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits [B, S, V] of tokens [B, S] after P in the caches, with the mask [B, P +
        S] of all."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs = {TOKENS: tokens, MASK: mask, POSITIONS: positions}
        fed = {
            name: ort_value(value.to(DTYPES[self._inputs[name].type]))
            for name, value in inputs.items()
            if name in self._inputs
        }
        logits, *caches = self._session.run_with_ort_values(
            [LOGITS, *self._next.values()], fed | self._caches
        )
        self._caches = dict(zip(self._next, caches, strict=True))
        computed: Tensor = torch.utils.dlpack.from_dlpack(logits)
        return computed


def ort_value(tensor: Tensor) -> Any:
    """Return a tensor as ONNX Runtime takes it."""
    from onnxruntime import OrtValue

    return OrtValue.from_dlpack(tensor.contiguous())


def providers(device: str, available: Sequence[str]) -> list[Any]:
    """Return the execution providers for `auto`, `cpu`, `cuda` or `cuda:1`; refuses one that is not
    installed."""
    cpu = "CPUExecutionProvider"
    cuda = "CUDAExecutionProvider"
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()):
        raise CompressionError(
            f"ONNX Runtime has no device {device!r} here; pass --device cpu, cuda or auto"
        )
    if kind == "cuda" and cuda not in available:
        raise CompressionError(
            f"device {device!r} needs onnxruntime-gpu, which is not installed; pass --device cpu"
        )
    if kind == "cpu" or cuda not in available:
        return [cpu]
    return [(cuda, {"device_id": int(number or 0)}), cpu]


def onnx_decoder(folder: Path, device: str) -> OnnxDecoder:
    """Open the folder's graph; raises `CompressionError` if ONNX Runtime cannot read it."""
    import onnxruntime

    chosen = providers(device, onnxruntime.get_available_providers())
    return OnnxDecoder(open_session(folder / GRAPH, onnxruntime.SessionOptions(), chosen))


def open_session(path: Path, settings: Any, chosen: Sequence[Any]) -> Any:
    """Open a graph with these execution providers; raises `CompressionError` if ONNX Runtime cannot
    read it."""
    import onnxruntime

    settings.log_severity_level = 4  # what fails is raised, too
    try:
        return onnxruntime.InferenceSession(str(path), settings, providers=chosen)
    except Exception as error:  # ONNX Runtime's exceptions share no class
        raise CompressionError(
            f"ONNX Runtime cannot read {path}: {reason_of(error)}; export it again"
        ) from error


def stream_text(tokenizer: Any, before: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Turn tokens into text as they come; the pieces joined are the decoded whole, less the text of
    `before`.

    All tokens are decoded anew each time: some decoders drop the space that opens a text, or judge
    a run of bytes as one. What is out stays, also where such a decoder takes it back. A character
    comes out once it is whole."""
    seen = list(before)

    def decode() -> str:
        return str(
            tokenizer.decode(seen, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    shown = len(decode())
    for token in tokens:
        seen.append(token)
        piece = decode().rstrip(UNFINISHED)[shown:]
        shown += len(piece)
        yield piece
    yield decode()[shown:]


@dataclass
class Continuation:
    """A prompt being continued: iterating gives pieces of text, and fills in the rest."""

    decoder: OnnxDecoder
    tokenizer: Any
    options: GenerationOptions
    stops: frozenset[int]
    prompt: tuple[int, ...]  # [S]
    tokens: list[int] = field(default_factory=list)  # chosen so far, an end token included
    stopped: Ended = "length"  # an end token came, or enough tokens
    first_seconds: float | None = None  # from the start to the first token
    seconds: float = 0.0  # from the start to the last token

    def __iter__(self) -> Iterator[str]:
        opening = () if self.options.chat else self.prompt  # an answer opens a text of its own
        yield from stream_text(self.tokenizer, opening, self._write())

    def _write(self) -> Iterator[int]:
        """Choose tokens, without the end token."""
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(self.options.seed)
        fresh = self.prompt
        while len(self.tokens) < self.options.max_new_tokens:
            number = torch.rand(1, generator=generator, dtype=torch.float64)
            token = int(choose(self.decoder(fresh)[None], self.options, number))
            self.tokens.append(token)
            self.seconds = time.perf_counter() - start
            self.first_seconds = self.first_seconds or self.seconds
            if token in self.stops:
                self.stopped = "end"
                return
            yield token
            fresh = (token,)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of all tokens after the first; None without them."""
        if self.first_seconds is None or self.seconds <= self.first_seconds:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_seconds)


@frozen
class OnnxModel(Model):
    """An ONNX export; every fault is a `CompressionError`."""

    source: ModelSource
    device: str = "auto"

    @property
    def facts(self) -> Mapping[str, Any]:
        packages = versions(("onnxruntime",))
        return {"files": stamp(self.source.folder), "device": self.device, "packages": packages}

    def complete(
        self, requests: Sequence[Request], options: Writing, progress: Progress
    ) -> Iterator[tuple[int, Answer]]:
        if not isinstance(options, GenerationOptions):
            raise CompressionError(
                f"{self.label} is an ONNX export, which answers prompts alone; name a safetensors "
                "checkpoint for tasks"
            )
        decoder, tokenizer, facts = self._ready()
        progress.start(f"Writing answers by {self.label}", len(requests))
        for number, request in enumerate(requests):
            seeded = options.model_copy(update={"seed": seed_of(request)})
            running = self._continuation(request[0], seeded, decoder.fresh(), tokenizer, facts)
            for _ in running:
                pass
            tokens = running.prompt, running.tokens
            yield number, answer_of(request, *tokens, facts.stops, tokenizer, options.chat)
            progress.advance("")

    def continuation(self, prompt: Prompt, options: GenerationOptions) -> Continuation:
        """Read a prompt and open the graph."""
        return self._continuation(prompt, options, *self._ready())

    def _ready(self) -> tuple[OnnxDecoder, Any, ModelFacts]:
        """Open the graph; return it with the tokenizer, and facts on generation."""
        folder = self.source.folder
        if not (folder / GRAPH).is_file():
            raise CompressionError(
                f"{folder} has no {GRAPH}; name the folder of an ONNX export, or run a safetensors "
                "checkpoint by transformers"
            )
        opened = self.opened()
        return onnx_decoder(folder, self.device), *opened

    def _continuation(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        decoder: OnnxDecoder,
        tokenizer: Any,
        facts: ModelFacts,
    ) -> Continuation:
        """Read a prompt for a decoder that has seen nothing."""
        ids = tokens_of(prompt, tokenizer, options.chat)
        in_a_sentence = wrap_faults(
            f"{self.source.folder} cannot be run",
            "pass a shorter prompt",
            "see whether ONNX Runtime can",
        )
        most = options.max_new_tokens
        if facts.positions is not None and len(ids) + most > facts.positions:
            logger.warning(
                "a prompt of %d tokens and up to %d new ones go beyond the %d positions that the "
                "model was made for; what comes after them may be nonsense",
                len(ids),
                most,
                facts.positions,
            )
        return Continuation(in_a_sentence(decoder), tokenizer, options, facts.stops, ids)
