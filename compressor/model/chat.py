"""A tokenizer's chat template, rendered as transformers does it."""

from collections.abc import Sequence
from typing import Any


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(tokenizer: Any, messages: Sequence[Any], add_generation_prompt: bool = False) -> str:
    """Return the text of a conversation; a template is a program, so that any exception may come."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
