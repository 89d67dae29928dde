"""A stock model in memory, by transformers alone; and what decides a checkpoint's answers.

Each token of a sampled answer is drawn with a number of its own: those of an answer depend on its
prompt and seed, not on what else is in the batch. (Rounding does, as on any server: two tokens that
are all but equally probable may change places in bfloat16.) B rows of a batch, S tokens, V words of
the vocabulary."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.answers.answering import (
    Answer,
    Likelihood,
    Model,
    ModelFacts,
    Request,
    Scoring,
    TaskWriting,
    Writing,
    answer_of,
    seed_of,
)
from compressor.answers.asking import padded
from compressor.answers.decoding import choose
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import tokens_of
from compressor.answers.scores import REPORT
from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.devices import pick_device
from compressor.errors import CompressionError, wrap_faults
from compressor.files import GOLDEN, RECEIPT, file_digest
from compressor.frozen import frozen
from compressor.model.architecture import build_meta, load_config, model_class
from compressor.model.opened import load_whole, memory_budget, pick_dtype
from compressor.progress import Progress, quiet_transformers
from compressor.run_record import versions

PACKAGES = ("lm-eval", "torch", "transformers")
REMEDIES = (
    "pass a smaller --batch-size, or --device cpu",
    "see whether its own library alone can do it",
)
CPU_ROWS, GPU_ROWS = 32, 64  # answers that are written together
TRIED = 16  # tokens, to see whether padding changes them
HEADROOM = 2**30  # bytes beside the weights: what lm-eval and a batch's logits take
# files beside the weights that decide what a model answers
READ_WHOLE = (".json", ".jinja", ".model", ".txt")


@dataclass
class StockModel(Model):
    """A checkpoint that stock transformers holds in memory."""

    source: ModelSource
    device: str = "auto"
    dtype: str = "auto"
    rows: int | None = None  # that are answered together; None: as many as do well
    think_end_token: Any = None  # of answers to tasks
    _asked: Any = field(default=None, init=False, repr=False)  # lm-eval's model, while it is loaded

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "model": checkpoint_facts(self.source),
            "dtype": self.dtype,
            "device": self.device,
            "packages": versions(PACKAGES),
        }

    @property
    def max_length(self) -> int:
        return int(self._asked.max_length)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        from compressor.answers.hf_model import HfModel

        self._asked = HfModel(self)
        device = self._asked.device
        try:
            yield
        finally:
            self._asked = None
            free(device)

    def opened(self) -> tuple[Any, ModelFacts]:
        tokenizer, facts = Model.opened(self)
        if not facts.stops:
            raise CompressionError(
                f"{self.label} has no end token, so no answer would end; name one as eos_token_id "
                "in generation_config.json"
            )
        return tokenizer, facts

    def score(
        self, requests: Sequence[Scoring], task: str, progress: Progress, rolling: bool = False
    ) -> Iterator[tuple[int, Likelihood]]:
        yield from enumerate(self._asked.scored(requests, task, progress, rolling))

    def complete(
        self, requests: Sequence[Request], options: Writing, progress: Progress
    ) -> Iterator[tuple[int, Answer]]:
        if isinstance(options, TaskWriting):
            yield from enumerate(self._asked.written(requests, options, progress))
            return
        tokenizer, facts = self.opened()
        if not fits_whole(self.source, self.dtype, self.device):
            raise CompressionError(
                f"{self.label} does not fit into memory, which writing answers takes; let a server "
                "write them (--server), or judge without generating (--text)"
            )
        queue = [
            _Question(number, request, tokens_of(request[0], tokenizer, options.chat))
            for number, request in enumerate(requests)
        ]
        queue.sort(key=lambda one: (-len(one.tokens), one.request[0].id, one.request[1]))
        device = pick_device(self.device)
        rows = self.rows or (CPU_ROWS if device.type == "cpu" else GPU_ROWS)
        progress.start(f"Writing answers by {self.label}", len(queue))
        with wrap_faults(f"{self.label} cannot write answers", *REMEDIES):
            model = load_writing(self.source.folder, self.device, self.dtype)
            largest = max(max(question.tokens) for question in queue)
            if largest >= model.get_input_embeddings().weight.shape[0]:
                raise CompressionError(
                    f"the tokenizer of {self.label} makes tokens that the model does not know"
                )
            try:
                # The longest come first, in batches of one length where padding changes answers.
                longest = queue[0].tokens
                padding = len(longest) - len(queue[-1].tokens)
                groups = [queue]
                if padding and not _takes_padding(model, longest, padding):
                    by_length = groupby(queue, lambda question: len(question.tokens))
                    groups = [list(group) for _, group in by_length]
                batches = list[Sequence[_Question]]()
                for group in groups:
                    batches += [group[at : at + rows] for at in range(0, len(group), rows)]
                for batch in batches:
                    written = _generate(model, batch, facts.stops, options)
                    for question, tokens in zip(batch, written, strict=True):
                        progress.advance("")
                        answer = answer_of(
                            question.request,
                            question.tokens,
                            tokens,
                            facts.stops,
                            tokenizer,
                            options.chat,
                        )
                        yield question.number, answer
            finally:
                del model
                free(device)


@frozen
class _Question:
    """A request with its number, and the tokens [S] of its prompt."""

    number: int
    request: Request
    tokens: tuple[int, ...]


@torch.inference_mode()
def _takes_padding(model: Any, tokens: Sequence[int], most: int) -> bool:
    """Return True if so much padding leaves the next tokens as they are, but for rounding.

    Some recurrent layers read it like text, and some sparse attention chooses it as keys.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=TRIED,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )

    def written(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        ids, mask = padded(rows, 0, "left")
        with quiet_transformers():
            written = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=settings,
            )
        return [step[-1].float() for step in written.logits]

    try:
        alone = written([tokens])
        beside = written([[0] * (len(tokens) + most), tokens])
    except Exception:  # a family that cannot take a mask raises what it likes
        return False
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    # of the same text, until a token differs
    for logits, padded_logits in zip(alone, beside, strict=False):
        if (logits - padded_logits).abs().max() > tolerance * (logits.max() - logits.min()):
            return False
        if logits.argmax() != padded_logits.argmax():
            break
    return True


@torch.inference_mode()
def _generate(
    model: Any, batch: Sequence[_Question], stops: frozenset[int], options: GenerationOptions
) -> list[list[int]]:
    """Return the new tokens of each row, up to its end token."""
    from transformers import GenerationConfig, LogitsProcessorList

    ids, mask = padded([question.tokens for question in batch], min(stops), "left")
    begin = ids.shape[1]
    drawn = []  # numbers in [0, 1) that choose an answer's tokens
    for question in batch:
        generator = torch.Generator().manual_seed(seed_of(question.request))
        drawn.append(torch.rand(options.max_new_tokens, generator=generator, dtype=torch.float64))
    numbers = torch.stack(drawn)

    def leave_chosen(tokens: Tensor, scores: Tensor) -> Tensor:
        """Mask all logits [B, V] but that of the chosen token of each row."""
        chosen = choose(scores, options, numbers[:, tokens.shape[1] - begin]).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

    model.generation_config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(stops),
        pad_token_id=min(stops),
    )
    with quiet_transformers():
        written = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=model.generation_config,
            logits_processor=LogitsProcessorList([leave_chosen]),
        )
    rows = []
    for row in written[:, begin:].tolist():
        end = next((index for index, token in enumerate(row, 1) if token in stops), len(row))
        rows.append(row[:end])
    return rows


def load_writing(folder: Path, device: str, dtype: str) -> Any:
    """Load a stock model that generates text; raises `CompressionError` for one that cannot.

    `dtype` 'auto' is the checkpoint's own."""
    from transformers import GenerationMixin

    config = load_config(folder)
    kind = model_class(config)
    torch_dtype = pick_dtype(dtype, config, Checkpoint(folder))
    if not kind.can_generate():
        raise CompressionError(
            f"{kind.__name__} does not generate text; name the folder of a causal language model"
        )
    if kind.generate is not GenerationMixin.generate:
        raise CompressionError(
            f"{kind.__name__} does not generate token by token; use its own generate() instead"
        )
    with quiet_transformers():
        return load_whole(folder, kind, dtype=torch_dtype).to(pick_device(device))


def free(device: torch.device) -> None:
    """Free the memory of a model that nothing refers to any more."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def checkpoint_facts(source: ModelSource, digests: bool = False) -> dict[str, Any]:
    """Return facts that decide a checkpoint's answers: a commit on the Hub, or the files of a
    folder.

    With the SHA-256 `digests` of its weight files, a copy is known for the model that was
    evaluated."""
    if source.revision is not None:
        return {"repository": source.name, "commit": source.revision}
    files = {}
    for path in sorted(source.folder.iterdir()):
        is_text = path.suffix in READ_WHOLE and path.is_file()
        if is_text and path.name not in (REPORT, GOLDEN, RECEIPT):
            files[path.name] = file_digest(path)
    weights = [list(entry) for entry in Checkpoint(source.folder).stamp()]
    facts: dict[str, Any] = {"weights": weights, "files": files}
    if digests:
        facts["digests"] = {
            str(name): file_digest(source.folder / str(name)) for name, *_ in weights
        }
    return facts


def weight_bytes(source: ModelSource, dtype: str) -> int:
    """Return the bytes of all weights in the dtype that they compute in; tied ones count once."""
    checkpoint = Checkpoint(source.folder)
    config = load_config(source.folder)
    model = build_meta(config, pick_dtype(dtype, config, checkpoint))
    return sum(value.nbytes for value in model.parameters())


def fits_whole(source: ModelSource, dtype: str, device: str) -> bool:
    """Return True if the stock loader can hold the model in the machine's memory, and in the
    device's own."""
    budgets = map(memory_budget, (torch.device("cpu"), pick_device(device)))
    needed = weight_bytes(source, dtype) + HEADROOM
    return all(budget is None or needed <= budget for budget in budgets)
