"""Answers of models to prompts, by stock transformers or a server, and a journal so that nothing is
asked twice.

Each token of a sampled answer is drawn with a number of its own: those of an answer depend on its
prompt and seed, not on what else is in the batch. (Rounding does, as on any server: two tokens that
are all but equally probable may change places in bfloat16.) B rows of a batch, S tokens, V words of
the vocabulary."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pydantic import TypeAdapter
from pydantic_core import from_json
from torch import Tensor

from compressor.answers.asking import padded
from compressor.answers.decoding import ModelFacts, choose, free, load_writing, read_facts
from compressor.answers.journal import Journal
from compressor.answers.lm_eval_run import PACKAGES, fits_whole, identity
from compressor.answers.options import NEW_TOKENS, AnswerOptions, GenerationOptions
from compressor.answers.prompts import Prompt, is_chat, read_prompts, tokens_of, usable_prompts
from compressor.answers.server import AT_ONCE, Message, Server, TextChoice, served_facts
from compressor.checkpoint.source import ModelSource
from compressor.devices import pick_device
from compressor.errors import CompressionError, wrap_faults
from compressor.model.tokenizer import (
    THINKING_END,
    load_tokenizer,
    templates_of,
    thinking_end,
    with_json_arguments,
)
from compressor.progress import Progress, quiet_transformers
from compressor.prompt_date import date_facts
from compressor.run_record import request_key, versions

logger = logging.getLogger(__name__)

GenerationRequest: TypeAlias = tuple[Prompt, int]  # and the seed that its answer is drawn with
Ended = Literal["end", "length"]  # by an end token, or since no more tokens were allowed
REMEDIES = (
    "pass a smaller --batch-size, or --device cpu",
    "see whether its own library alone can do it",
)
# a server's reasons to finish that are the model's own
ENDED = ("stop", "tool_calls", "function_call")
CPU_ROWS, GPU_ROWS = 32, 64  # answers that are written together
TRIED = 16  # tokens, to see whether padding changes them


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that have been read, and the options by which models answer them."""

    prompts: tuple[Prompt, ...]
    options: AnswerOptions
    seed: int = 0  # of the first answer to each prompt

    @classmethod
    def read(
        cls, options: AnswerOptions, limit: int | None = None, seed: int = 0
    ) -> "PromptSet | None":
        """Read the prompts that the options name, at most `limit` of each source; None if they name
        none."""
        if not options.prompts:
            return None
        return cls(read_prompts(options.prompts, limit=limit, strict=options.strict), options, seed)

    @property
    def requests(self) -> list[GenerationRequest]:
        """Each prompt with each seed."""
        seeds = range(self.seed, self.seed + self.options.seeds)
        return [(prompt, seed) for prompt in self.prompts for seed in seeds]

    @property
    def answers(self) -> int:
        """Number of answers of each model."""
        return len(self.prompts) * self.options.seeds

    def fitted(
        self, opened: Sequence[tuple[Any, ModelFacts]]
    ) -> "tuple[PromptSet, GenerationOptions]":
        """Return the prompts that all models take, by their tokenizers and facts, and how answers
        are generated."""
        positions = min(facts.positions or sys.maxsize for _, facts in opened)
        usual = max(1, min(NEW_TOKENS, positions // 2))
        generation = self.options.generation(usual)
        most = max(0, positions - generation.max_new_tokens)
        prompts = self.prompts
        for tokenizer, _ in opened:
            prompts = usable_prompts(
                prompts, tokenizer, self.options.chat, most, self.options.strict
            )
        return replace(self, prompts=prompts), generation


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its tokens with the end token, if there is one, and their text without it."""

    prompt: str  # the prompt's id
    seed: int
    tokens: tuple[int, ...]  # [S]; empty where a server does not tell them
    text: str  # special tokens are shown
    ended: Ended

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt, self.seed


@dataclass(frozen=True, slots=True)
class StockGenerator:
    """A checkpoint that generates text in memory by stock transformers."""

    source: ModelSource
    device: str = "auto"
    dtype: str = "auto"
    rows: int | None = None  # written together

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "model": identity(self.source),
            "dtype": self.dtype,
            "device": self.device,
            "packages": versions(PACKAGES),
        }

    def opened(self) -> tuple[Any, ModelFacts]:
        tokenizer = load_tokenizer(self.source.folder)
        facts = read_facts(self.source.folder, tokenizer)
        if not facts.stops:
            raise CompressionError(
                f"{self.label} has no end token, so no answer would end; name one as eos_token_id "
                "in generation_config.json"
            )
        return tokenizer, facts

    def write(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, progress: Progress
    ) -> Iterator[Answer]:
        if not requests:
            return
        tokenizer, facts = self.opened()
        if not fits_whole(self.source, self.dtype, self.device):
            raise CompressionError(
                f"{self.label} does not fit into memory, which writing answers takes; let a server "
                "write them (--server), or judge without generating (--text)"
            )
        shown = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        queue = []
        for prompt, seed in requests:
            queue.append(_Question(prompt, seed, tokens_of(prompt, tokenizer, options.chat)))
        queue.sort(key=lambda question: (-len(question.tokens), question.prompt.id, question.seed))
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
                        # some decoders drop the space that opens a text: what is continued is
                        # decoded with its start
                        prompt = question.prompt
                        opening = () if prompt.messages or options.chat else question.tokens
                        ended: Ended = "end" if tokens[-1] in facts.stops else "length"
                        of_text = tokens[:-1] if ended == "end" else tokens
                        before = tokenizer.decode(opening, **shown)
                        text = tokenizer.decode([*opening, *of_text], **shown)[len(before) :]
                        yield Answer(prompt.id, question.seed, tuple(tokens), text, ended)
            finally:
                del model
                free(device)


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt with the seed of its answer, and its tokens [S]."""

    prompt: Prompt
    seed: int
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


def seed_of(request: GenerationRequest) -> int:
    """Return the seed that an answer is drawn with; each prompt has its own."""
    return int(hashlib.sha256(f"{request[0].id} {request[1]}".encode()).hexdigest()[:15], 16)


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
        generator = torch.Generator().manual_seed(seed_of((question.prompt, question.seed)))
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


@dataclass(frozen=True, slots=True)
class ServedGenerator:
    """A served model that generates text; `source` holds its tokenizer."""

    server: Server  # checked
    source: ModelSource
    at_once: int = AT_ONCE

    @property
    def label(self) -> str:
        return self.server.label

    @property
    def facts(self) -> Mapping[str, Any]:
        return served_facts(self.server, self.source.folder)

    def opened(self) -> tuple[Any, ModelFacts]:
        facts = read_facts(self.source.folder)
        limits = [limit for limit in (facts.positions, self.server.max_length) if limit]
        facts = replace(facts, positions=min(limits, default=None))
        return load_tokenizer(self.source.folder), facts

    def write(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, progress: Progress
    ) -> Iterator[Answer]:
        tokenizer = load_tokenizer(self.source.folder)
        progress.start(f"Writing answers by {self.label}", len(requests))

        def ask(request: GenerationRequest) -> Answer:
            prompt, seed = request
            question: dict[str, Any] = {
                "max_tokens": options.max_new_tokens,
                "temperature": options.temperature,
                "seed": seed_of(request) % 2**31,  # what servers take
                **self.server.plain,
            }
            if options.top_p is not None:
                question["top_p"] = options.top_p
            if is_chat(prompt, tokenizer, options.chat):
                question["messages"] = [with_json_arguments(message) for message in prompt.chat]
                if prompt.tools:
                    question["tools"] = prompt.tools
            else:
                question["prompt"] = prompt.text
            choice = self.server.complete(question)
            if isinstance(choice, TextChoice):
                text = choice.text
            else:
                text = message_text(choice.message, prompt, tokenizer, options.chat)
            ended: Ended = "end" if choice.finish_reason in ENDED else "length"
            return Answer(prompt.id, seed, (), text, ended)

        for answer in self.server.all(requests, ask, self.at_once):
            progress.advance("")
            yield answer


def message_text(message: Message, prompt: Prompt, tokenizer: Any, chat: bool) -> str:
    """Return a model's whole text from a message in which a server has separated thinking and tool
    calls."""
    text = message.text
    thinking = message.reasoning_content or message.reasoning
    if thinking is not None:
        end = thinking_end(tokenizer) or THINKING_END
        begin = end.replace("/", "", 1)
        is_open = tokenizer.decode(tokens_of(prompt, tokenizer, chat)).rstrip().endswith(begin)
        opening = "" if is_open else f"{begin}\n"
        text = f"{opening}{thinking.strip()}\n{end}\n\n{text.lstrip()}"
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        with suppress(ValueError):  # else it is shown as it was written
            arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
        text = f"{text}\n<tool_call>\n{shown}\n</tool_call>".lstrip("\n")
    return text


TextGenerator = StockGenerator | ServedGenerator


def writer_of(
    source: ModelSource, server: Server | None, rows: int | None, device: str, dtype: str
) -> TextGenerator:
    """Return the generator of a model's answers: stock transformers, `rows` answers at once, or its
    server."""
    if server is not None:
        return ServedGenerator(server, source, rows or AT_ONCE)
    return StockGenerator(source, device, dtype, rows)


def journal_of(writer: TextGenerator, options: GenerationOptions, folder: Path) -> Journal:
    """Return the journal of a writer's answers in a folder: one for each model, options, and date
    in prompts."""
    facts = options.facts("max_new_tokens", "temperature", "top_p", "top_k", "chat")
    dates = date_facts(templates_of(load_tokenizer(writer.source.folder)))
    name = "-".join(["answers", request_key(writer.facts, facts)[:32], *dates.values()])
    return Journal(folder / f"{name}.jsonl", TypeAdapter(Answer))


def answer_all(
    writer: TextGenerator,
    requests: Iterable[GenerationRequest],
    options: GenerationOptions,
    folder: Path,
    progress: Progress,
) -> list[Answer]:
    """Return the answers in the order of the requests; those in the folder's journal are not asked
    again."""
    requests = list(requests)
    journal = journal_of(writer, options, folder)
    known = {answer.key: answer for answer in journal.read()}
    missing = [(prompt, seed) for prompt, seed in requests if (prompt.id, seed) not in known]
    for answer in writer.write(missing, options, progress):
        journal.add(answer)
        known[answer.key] = answer
    return [known[prompt.id, seed] for prompt, seed in requests]
