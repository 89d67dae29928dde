"""A checkpoint's tokenizer and chat template as stock transformers load them; a made-up one is refused."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, reason_of
from compressor.progress import quiet_transformers

THINKING_END = "</think>"
THINKING_ENDS = re.compile(r"</[\w:]*think\w*>|\[/think\]|◁/think▷|<\|channel\|>final", re.IGNORECASE)  # in templates
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.*.json", "tekken.json", "vocab*"),
    *("*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.codes"),
)
MARGIN = 4096  # tokens after the ones that are wanted, where a text that is cut off may differ from the whole one
LETTERS, LONGEST = 6, 96  # of a token: as many as it often has; so many only in texts of blanks, marks or the unknown


def load_tokenizer(folder: Path, remedy: str = "copy those of the original model there") -> Any:
    """The checkpoint's tokenizer; raises `CompressionError` if it has none, or one that knows no text."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)  # None would ask
    except Exception as error:  # tokenizer classes raise what they like
        raise CompressionError(f"{folder} has no usable tokenizer ({reason_of(error)}); {remedy}") from error
    own = tuple((getattr(tokenizer, "vocab_files_names", None) or {}).values())
    files = (*own, *VOCABULARIES) if own else (*VOCABULARIES, "tokenizer_config.json")  # which names a class without
    if not any(path.is_file() for name in files for path in folder.glob(name)):
        fault = f"no file there defines the {type(tokenizer).__name__} that transformers makes up"
    else:
        try:
            tokens = set(tokenizer.get_vocab().values())
        except NotImplementedError:  # which the base class of slow tokenizers raises
            return tokenizer
        if not tokens <= set(getattr(tokenizer, "all_special_ids", ())):
            return tokenizer
        fault = "its vocabulary holds nothing but special tokens"
    raise CompressionError(f"{folder} has no usable tokenizer ({fault}); {remedy}")


def first_tokens(tokenizer: Any, text: str, most: int) -> list[int]:
    """The first `most` tokens of a text, without special ones: of a long text no more is read than they need.

    They are those of the whole text, as far as a token hangs on the `MARGIN` tokens after it alone. A text of which
    `LONGEST` letters make one token, or none, counts as one that ends there.
    """
    letters = LETTERS * (most + MARGIN)
    end = LONGEST * (most + MARGIN)
    while letters < len(text):
        ids = tokenizer(text[:letters], add_special_tokens=False)["input_ids"]
        if len(ids) >= most + MARGIN or letters == end:
            return list(ids[:most])
        letters = min(2 * letters, end)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"][:most])


def says_something(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether any of a text's tokens is other than the one for what is unknown."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return any(token != unknown for token in ids)


def no_token(text: str) -> CompressionError:
    """What is wrong where no token stands for that text."""
    return CompressionError(
        f"the tokenizer has no token for {text}, or only the one for what is unknown; restore the tokenizer's files "
        "from the original model, or give text that it was made for"
    )


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def thinking_end(tokenizer: Any) -> str | None:
    """What ends a model's thinking, as its chat template has it, else `</think>` where that is one token; or None."""
    template = getattr(tokenizer, "chat_template", None) or ""
    texts = template.values() if isinstance(template, dict) else [template]
    found = next((match[0] for text in texts if (match := THINKING_ENDS.search(text))), None)
    known = THINKING_END in tokenizer.get_vocab()
    return found or (THINKING_END if known else None)


def render_chat(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Return the text of a conversation; a template is a program, so that any exception may come."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
