"""From a prompt to token ids, and from token ids back to text, piece by piece."""

from collections.abc import Sequence
from typing import Any

from compressor.errors import CompressionError, faults_told, reason_of
from compressor.model.chat import ChatTemplate
from compressor.model.tokenizer import no_token, says_something

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet
LONGEST = 3  # bytes of a character that lacks its last one: a decoder shows up to that many marks for them


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> tuple[int, ...]:
    """Token ids of the prompt, [S]; of an empty one, the token that opens a text."""
    with faults_told("the tokenizer cannot take the prompt", "shorten it", "restore the tokenizer or mend the prompt"):
        encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
    if prompt.strip() and not says_something(tokenizer, [x for x, own in zip(ids, added, strict=True) if not own]):
        raise no_token("the prompt")
    if chat:
        return _encode_chat(tokenizer, prompt)
    if ids:
        return tuple(map(int, ids))
    if tokenizer.bos_token_id is not None:
        return (int(tokenizer.bos_token_id),)
    raise CompressionError(
        "the prompt is empty, and the tokenizer has no token that opens a text; give some text to go on from"
    )


def _encode_chat(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    with ChatTemplate(tokenizer) as template:
        if not template:
            raise CompressionError(
                "the tokenizer has no chat template; leave out --chat to continue the prompt as it is"
            )
        try:
            text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
            encoded = tokenizer(text, add_special_tokens=False)
        except Exception as error:  # templates are programs
            raise CompressionError(
                f"the tokenizer's chat template fails ({reason_of(error)}); leave out --chat"
            ) from error
    if ids := tuple(int(token) for token in encoded["input_ids"]):
        return ids
    raise CompressionError("the tokenizer's chat template makes nothing of the prompt; leave out --chat")


class TextStream:
    """Turns tokens into text as they come; the pieces joined are the decoded whole, less the text of `before`.

    Only tokens since the last whole character are decoded anew, after those of the piece before them: some
    decoders drop the space that opens a text, and it must not be dropped at the seams.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._follow(list(before))

    def _follow(self, context: list[int]) -> None:
        self._context = context
        self._opening = self._shown = self._decode(context)  # text of the context; with what is out of pending

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return decoded

    def _text(self, final: bool) -> str:
        """Context and pending decoded; of pending alone if the decoder takes back for good what is out."""
        text = self._decode([*self._context, *self._pending])
        if text.startswith(self._shown):
            return text
        # a decoder that judges a run of bytes as one may do so only for want of the next byte
        if not final and text.endswith(UNFINISHED) and len(self._pending) <= LONGEST:
            return self._shown
        self._context, self._opening, self._shown = [], "", self._shown[len(self._opening) :]
        return self._decode(self._pending)

    def push(self, token: int) -> str:
        """What this token adds to the text; '' while a character is incomplete."""
        self._pending.append(token)
        text = self._text(final=False)
        marks = len(text) - len(text.rstrip(UNFINISHED))
        piece = text[len(self._shown) : len(text) - min(marks, LONGEST)]
        self._shown += piece
        if piece and not marks:
            done, self._pending = self._pending, []
            self._follow(done)
        return piece

    def finish(self) -> str:
        """What was held back; a character that never became whole shows as a mark."""
        return self._text(final=True)[len(self._shown) :]
