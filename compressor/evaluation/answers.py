"""What a model answers to prompts, written whole by stock transformers, and a journal in which nothing is asked twice.

Each token of a sampled answer is drawn with a number of its own: those of an answer depend on its prompt and seed, not
on what else is in the batch. (Rounding does, as on any server: two tokens that are all but equally probable may change
places in bfloat16.) B rows of a batch, S tokens, V words of the vocabulary.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource
from compressor.devices import pick_device
from compressor.errors import CompressionError, wrap_faults
from compressor.evaluation.evaluate import PACKAGES, fits_whole, identity
from compressor.evaluation.generate import ModelFacts, load_writing, probabilities, read_facts
from compressor.evaluation.options import GenerationOptions
from compressor.evaluation.prompts import Prompt, tokens_of
from compressor.files import wrap_full_disk
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, quiet_transformers
from compressor.records import plain_json, read_as
from compressor.run_record import request_key, versions

logger = logging.getLogger(__name__)

Asked: TypeAlias = tuple[Prompt, int]  # and the seed that its answer is drawn with
Ended = Literal["end", "length"]  # by an end token, or since no more tokens were allowed
REMEDIES = ("pass a smaller --batch-size, or --device cpu", "see whether its own library alone can do it")
CPU_ROWS, GPU_ROWS = 32, 64  # answers that are written together
TRIED = 16  # tokens, to see whether padding changes them


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its tokens, an end token included where it came, and their text without it."""

    prompt: str  # the prompt's id
    seed: int
    tokens: tuple[int, ...]  # [S]; empty where a server does not tell them
    text: str  # special tokens are shown
    ended: Ended

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt, self.seed


class Writer(Protocol):
    """Whatever answers: a model in memory, or a server."""

    @property
    def label(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Plain JSON: all that decides the answers beside prompts and options."""

    def opened(self) -> tuple[Any, ModelFacts]:
        """Tokenizer, None where there is none, and facts; raises `CompressionError` for what cannot end an answer."""

    def write(self, asked: Sequence[Asked], options: GenerationOptions, progress: Progress) -> Iterator[Answer]:
        """The answers in any order, each as soon as it is there."""


@dataclass(frozen=True, slots=True)
class StockWriter:
    """A checkpoint that stock transformers hold in memory while it writes."""

    source: ModelSource
    device: str = "auto"
    dtype: str = "auto"
    rows: int | None = None  # written together

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def facts(self) -> Mapping[str, Any]:
        own = {"dtype": self.dtype, "device": self.device, "packages": versions(PACKAGES)}
        return {"model": identity(self.source), **own}

    def opened(self) -> tuple[Any, ModelFacts]:
        folder = self.source.folder
        facts, tokenizer = read_facts(folder), load_tokenizer(folder)
        end = getattr(tokenizer, "eos_token_id", None)
        known = facts.vocabulary
        if foreign := sorted(token for token in facts.stops if known is not None and not 0 <= token < known):
            raise CompressionError(
                f"{self.label}: eos_token_id {foreign[0]} is no token of the {known} that the model has, so no answer "
                "would end; correct generation_config.json or config.json"
            )
        # as servers do: what its config names, and what the tokenizer ends a turn with
        stops = facts.stops | ({int(end)} if end is not None and (known is None or end < known) else set())
        if not stops:
            raise CompressionError(
                f"{self.label} has no end token, so no answer would end; name one as eos_token_id in "
                "generation_config.json"
            )
        return tokenizer, ModelFacts(stops, known, facts.positions)

    def write(self, asked: Sequence[Asked], options: GenerationOptions, progress: Progress) -> Iterator[Answer]:
        if not asked:
            return
        tokenizer, facts = self.opened()
        if not fits_whole(self.source, self.dtype, self.device):
            raise CompressionError(
                f"{self.label} does not fit into memory, which writing answers takes; let a server write them "
                "(--server), or judge without generating (--text)"
            )
        queue = [(prompt, seed, tokens_of(prompt, tokenizer, options.chat)) for prompt, seed in asked]
        queue.sort(key=lambda each: (-len(each[2]), each[0].id, each[1]))
        place = pick_device(self.device)
        rows = self.rows or (CPU_ROWS if place.type == "cpu" else GPU_ROWS)
        progress.start(f"Writing answers by {self.label}", len(queue))
        with wrap_faults(f"{self.label} cannot write answers", *REMEDIES):
            model = load_writing(self.source.folder, self.device, self.dtype)
            if max(token for _, _, ids in queue for token in ids) >= model.get_input_embeddings().weight.shape[0]:
                raise CompressionError(f"the tokenizer of {self.label} makes tokens that the model does not know")
            most = len(queue[0][2]) - len(queue[-1][2])
            alike = not most or _takes_padding(model, queue[0][2], most)
            try:
                for _, same in groupby(queue, lambda each: True if alike else len(each[2])):
                    group = list(same)
                    for begin in range(0, len(group), rows):
                        batch = group[begin : begin + rows]
                        made = _generate(model, batch, facts.stops, options)
                        for (prompt, seed, ids), tokens in zip(batch, made, strict=True):
                            progress.advance("")
                            # some decoders drop the space that opens a text: what is continued comes with its start
                            opening = () if prompt.messages or options.chat else ids
                            yield _answer(tokenizer, prompt, seed, opening, tokens, facts.stops)
            finally:
                del model
                gc.collect()
                if place.type != "cpu":
                    torch.accelerator.empty_cache()


def padded(rows: Sequence[Sequence[int]], token: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, S], padded on the left, and their mask [B, S]."""
    most = max(map(len, rows))
    ids = torch.tensor([[token] * (most - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.inference_mode()
def _takes_padding(model: Any, tokens: Sequence[int], most: int) -> bool:
    """Whether so much padding leaves the next tokens as they are, but for rounding.

    Some recurrent layers read it like text, and some sparse attention chooses it as keys.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=TRIED, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )

    def written(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        ids, mask = padded(rows, 0, model.device)
        with quiet_transformers():
            made = model.generate(ids, attention_mask=mask, generation_config=settings)
        return [step[-1].float() for step in made.logits]

    try:
        alone, beside = written([tokens]), written([[0] * (len(tokens) + most), tokens])
    except Exception:  # a family that cannot take a mask raises what it likes
        return False
    for one, other in zip(alone, beside, strict=False):  # of the same text, until a token differs
        if float((one - other).abs().max()) > torch.finfo(model.dtype).eps ** 0.5 * float(one.max() - one.min()):
            return False
        if one.argmax() != other.argmax():
            break
    return True


def draws(asked: Asked, count: int) -> Tensor:
    """The numbers in [0, 1) that choose an answer's tokens, [count] in float64."""
    seed = int(hashlib.sha256(f"{asked[0].id} {asked[1]}".encode()).hexdigest()[:15], 16)
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(distribution: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the sum of probabilities passes each row's number: [B, V], [B] -> [B]."""
    passed = distribution.cumsum(-1)
    return (passed <= numbers[:, None].to(passed.device) * passed[:, -1:]).sum(-1)


class _Choosing:
    """Leaves of the logits [B, V] the one token that each row is to go on with; a processor of stock `generate`."""

    def __init__(self, asked: Sequence[Asked], prompt: int, options: GenerationOptions) -> None:
        self.prompt, self.options = prompt, options
        if options.temperature:
            self.numbers = torch.stack([draws(each, options.max_new_tokens) for each in asked])

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise CompressionError(
                "the model's logits are not finite; try --dtype float32, and check its weights if that does not help"
            )
        if not (options := self.options).temperature:
            return scores
        chances = probabilities(scores, options.temperature, options.top_k, options.top_p)
        chosen = drawn(chances, self.numbers[:, tokens.shape[1] - self.prompt]).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


@torch.inference_mode()
def _generate(
    model: Any, batch: Sequence[tuple[Prompt, int, Sequence[int]]], stops: frozenset[int], options: GenerationOptions
) -> list[list[int]]:
    """New tokens of each row, up to its end token."""
    from transformers import GenerationConfig, LogitsProcessorList

    ids, mask = padded([tokens for _, _, tokens in batch], min(stops), model.device)
    choosing = _Choosing([(prompt, seed) for prompt, seed, _ in batch], ids.shape[1], options)
    model.generation_config = settings = GenerationConfig(
        max_new_tokens=options.max_new_tokens, do_sample=False, eos_token_id=sorted(stops), pad_token_id=min(stops)
    )
    with quiet_transformers():
        made = model.generate(
            ids,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([choosing]),
        )
    rows = []
    for row in made[:, ids.shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        rows.append(row[: end + 1])
    return rows


def _answer(
    tokenizer: Any, prompt: Prompt, seed: int, opening: Sequence[int], tokens: Sequence[int], stops: frozenset[int]
) -> Answer:
    ended: Ended = "end" if tokens[-1] in stops else "length"
    own = tokens[: len(tokens) - (ended == "end")]

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return Answer(prompt.id, seed, tuple(tokens), decode([*opening, *own])[len(decode(opening)) :], ended)


@dataclass(frozen=True, slots=True)
class Journal:
    """Answers as JSON lines, each with the key of the model and the options that it was written with.

    Lines of another key, and one that was cut off, are left as they are.
    """

    path: Path
    key: str

    @classmethod
    def of(cls, writer: Writer, options: GenerationOptions, path: Path) -> "Journal":
        """The journal of a writer's answers; `path` is a file, or a folder that holds a file for each key."""
        named = ("max_new_tokens", "temperature", "top_p", "top_k", "chat")
        key = request_key(writer.facts, {name: getattr(options, name) for name in named})[:32]
        return cls(path / f"answers-{key}.jsonl" if path.suffix != ".jsonl" else path, key)

    def read(self) -> dict[tuple[str, int], Answer]:
        """The answers that there are, by prompt and seed; without lines that no file of text can hold."""
        found = dict[tuple[str, int], Answer]()
        with suppress(OSError), self.path.open("rb") as stream:
            for line in stream:
                with suppress(ValueError, CompressionError, RecursionError):
                    content = json.loads(line.decode())
                    if isinstance(content, dict) and content.get("key") == self.key:
                        answer = read_as(Answer, content)
                        answer.text.encode()  # half a character is none of UTF-8
                        found[answer.key] = answer
        return found

    def add(self, answer: Answer, **more: Any) -> None:
        """Append an answer, with further fields where they are wanted."""
        line = json.dumps({"key": self.key, **plain_json(asdict(answer)), **more})
        with wrap_full_disk(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as stream:
                if stream.seek(0, 2):
                    stream.seek(-1, 2)
                    line = line if stream.read() == b"\n" else f"\n{line}"  # a line was cut off
                stream.write(f"{line}\n".encode())


def answer_all(
    writer: Writer, asked: Iterable[Asked], options: GenerationOptions, journal: Journal, progress: Progress
) -> list[Answer]:
    """The answers in the order of what is asked; those that the journal has are not asked again."""
    wanted = [(prompt, seed) for prompt, seed in asked]
    known = journal.read()
    missing = [each for each in wanted if (each[0].id, each[1]) not in known]
    for answer in writer.write(missing, options, progress):
        journal.add(answer)
        known[answer.key] = answer
    return [known[prompt.id, seed] for prompt, seed in wanted]
