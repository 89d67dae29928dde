"""Prompts: texts to continue, or chats without their last answer, read from the same sources as
other text."""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from compressor.answers.options import NEW_TOKENS, AnswerOptions, GenerationOptions
from compressor.data.chats import (
    ANSWERING,
    ASKING,
    CHATS,
    CHOSEN,
    LANGUAGE,
    note_columns,
    read_row,
    require_template,
    untaken,
)
from compressor.data.rows import Row, source_rows
from compressor.data.sources import SourceSpec, WeightedSource, domain_of
from compressor.errors import CompressionError, ItemError, LeftOut, wrap_faults
from compressor.frozen import frozen
from compressor.model.tokenizer import (
    first_part,
    has_chat_template,
    no_token,
    render_chat,
    says_something,
)
from compressor.progress import quiet_transformers
from compressor.records import Json

COLUMNS = tuple(zip((ASKING[0], *CHATS, CHOSEN, "text", *ASKING[1:]), strict=True))
OF_A_DATA_SET = 1_000  # prompts, where nobody says how many


@frozen
class Prompt:
    """A text to continue, or the messages of a chat to answer, with the tools that may be called.

    One that has both is a chat where the tokenizer has a template for it.
    """

    id: str  # digest of all that a model is asked
    domain: str
    text: str | None = None
    messages: tuple[Json, ...] = ()
    tools: Sequence[Any] | None = None
    where: str = field(default="", compare=False)  # it was read
    language: str | None = None  # of the answer, in the row's own word

    @classmethod
    def of(
        cls,
        question: str | Sequence[Json],
        domain: str = "",
        tools: Sequence[Any] | None = None,
        where: str = "",
        text: str | None = None,
    ) -> "Prompt":
        """Return a prompt with its id."""
        content = json.dumps([question, tools], sort_keys=True, ensure_ascii=False, default=str)
        identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        if isinstance(question, str):
            return cls(identity, domain, question, where=where)
        return cls(identity, domain, text, tuple(question), tools, where)

    @property
    def chat(self) -> list[Json]:
        """The messages of a chat, or the text as a user's message."""
        return list(self.messages) or [{"role": "user", "content": self.text}]

    @property
    def shown(self) -> str:
        """The text, or the last message's, for people."""
        content = self.messages[-1].get("content") if self.text is None else self.text
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def read_prompts(
    arguments: Sequence[str], *, limit: int | None = None, strict: bool = False
) -> tuple[Prompt, ...]:
    """Read the prompts of `SOURCE` or `SOURCE=DOMAIN` each, without duplicates, at most `limit` of
    each source.

    Without a limit `OF_A_DATA_SET` of a data set are read. A chat that ends with the assistant's
    answer is asked without it. Of a text file each document is a prompt, or each line where no
    blank lines separate documents. Rows without a prompt are left out with one warning for each
    source, or refused if `strict`."""
    prompts = dict[str, Prompt]()
    for source, domain in map(domain_of, arguments):
        read = source_rows(WeightedSource(source, 1.0), 0, "prompts")
        rows: Iterable[Row] = read.rows
        if read.is_prose:
            rows = documents = list(rows)
            if len(documents) == 1 and isinstance(documents[0][1], str):
                where, document = documents[0]
                lines = document.removesuffix("\n").split("\n")
                rows = [(f"{where}, line {number}", line) for number, line in enumerate(lines, 1)]
        column = SourceSpec.parse(source).column
        left_out = LeftOut(f"prompts of {source}", strict)
        taken = 0
        most = OF_A_DATA_SET if limit is None and read.is_streamed else limit
        for where, row in rows:
            with left_out.each():
                conversation = read_row(row, column, where, COLUMNS)
                if column is None:
                    note_columns(row, conversation, left_out, (*ANSWERING, LANGUAGE))
                text = conversation.text
                if text is not None and not text.strip():
                    raise ItemError(f"{where} has no text; give it some or remove it")
                if text is not None and conversation.columns[0] not in ASKING:
                    prompt = Prompt.of(text.removesuffix("\n"), domain, where=where)
                else:
                    messages = conversation.messages
                    while messages and messages[-1].get("role") == "assistant":
                        messages.pop()
                    if not messages:
                        raise ItemError(
                            f"{where} has nothing before the assistant's answer; give it a user's "
                            "message"
                        )
                    prompt = Prompt.of(messages, domain, conversation.tools, where, text)
                if isinstance(row, Mapping) and isinstance(row.get(LANGUAGE), str):
                    prompt = replace(prompt, language=row[LANGUAGE])
                taken += prompt.id not in prompts
                prompts.setdefault(prompt.id, prompt)
            if taken == most:
                break
        left_out.report()
        if not left_out.used:
            raise CompressionError(f"--prompts {source} has no prompts; give it some text")
    return tuple(prompts.values())


def usable_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    chat: bool = False,
    most: int = sys.maxsize,
    strict: bool = False,
) -> tuple[Prompt, ...]:
    """Return the prompts that tokenizer and template can take, in at most so many tokens.

    The others are left out with one warning, or refused if `strict`.
    """
    usable = []
    left_out = LeftOut("prompts", strict)
    with quiet_transformers():
        for prompt in prompts:
            with left_out.each():
                tokens_of(prompt, tokenizer, chat, most)
                usable.append(prompt)
    left_out.report()
    return tuple(usable)


def is_chat(prompt: Prompt, tokenizer: Any, chat: bool) -> bool:
    """Return True if a prompt is put into the chat template."""
    return prompt.text is None or chat or (bool(prompt.messages) and has_chat_template(tokenizer))


def tokens_of(
    prompt: Prompt, tokenizer: Any, chat: bool = False, most: int = sys.maxsize
) -> tuple[int, ...]:
    """Return token ids [S] of a prompt, a chat's by the template, and of an empty text the token
    that opens one; raises `ItemError` where they fail.

    With `chat` a text is put into the template, too, as a user's message. Where the tokens are more
    than `most`, not all of them are made, and `ItemError` is raised."""
    if is_chat(prompt, tokenizer, chat):
        require_template(tokenizer, f"{prompt.where or 'a prompt'} is a chat")
        taker = "chat template"
        try:
            text = render_chat(
                tokenizer, prompt.chat, tools=prompt.tools, add_generation_prompt=True
            )
            taker = "tokenizer"
            ids = tuple(map(int, first_part(tokenizer, text, most + 1)[1]))
        except Exception as error:  # templates are programs
            raise untaken(prompt.where, error, taker) from error
    else:
        text, _ = first_part(tokenizer, str(prompt.text), most)
        try:
            with wrap_faults(
                "the tokenizer cannot take the prompt",
                "shorten it",
                "restore the tokenizer or mend the prompt",
            ):
                encoded = tokenizer(text, return_special_tokens_mask=True)
            ids = tuple(map(int, encoded["input_ids"]))
            added = encoded["special_tokens_mask"]
            of_text = [token for token, is_added in zip(ids, added, strict=True) if not is_added]
            if text.strip() and not says_something(tokenizer, of_text):
                raise no_token("the prompt")
            if not ids and tokenizer.bos_token_id is None:
                raise CompressionError(
                    "the prompt is empty, and the tokenizer has no token that opens a text; give "
                    "some text to go on from"
                )
            ids = ids or (int(tokenizer.bos_token_id),)
        except CompressionError as error:
            raise ItemError(f"{prompt.where}: {error}") from error
    if not ids:
        raise ItemError(f"{prompt.where}: the chat template makes nothing of it")
    if len(ids) > most:
        raise ItemError(
            f"{prompt.where} has more than {most:,} tokens, which with --max-new-tokens goes "
            "beyond the positions that the model was made for; shorten it or lower that"
        )
    return ids


@frozen
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
    def requests(self) -> list[tuple[Prompt, int]]:
        """Each prompt with each seed."""
        seeds = range(self.seed, self.seed + self.options.seeds)
        return [(prompt, seed) for prompt in self.prompts for seed in seeds]

    @property
    def answers(self) -> int:
        """Number of answers of each model."""
        return len(self.prompts) * self.options.seeds

    def fitted(self, opened: Sequence[tuple[Any, Any]]) -> "tuple[PromptSet, GenerationOptions]":
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
