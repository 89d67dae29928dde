"""Calibration with pictures, video and sound: sequences made of rows by the model's own processor.

Each row is a sequence of its own and is never packed with others.
"""

import hashlib
import os
import random
import reprlib
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from io import BytesIO
from os.path import isfile, realpath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.chats import (
    CHAT_FIRST,
    COLUMNS,
    Conversation,
    Message,
    media_beside,
    note_columns,
    read_row,
    untaken,
)
from compressor.data.rows import REMEDIES, Purpose, Row, source_rows
from compressor.data.sources import SourceSpec, WeightedSource
from compressor.errors import CompressionError, ItemError, LeftOut, reason_of, wrap_faults
from compressor.model.inputs import Inputs
from compressor.model.remote_code import load_stock
from compressor.model.tokenizer import (
    as_part,
    check_vocabulary,
    first_part,
    render_chat,
)
from compressor.progress import quiet_transformers

BASE64 = 256  # letters; a longer string is a picture in base64, not the name of a file
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow may run programs for others
# names a folder whose files rows may use, besides the folder of the data
MEDIA_VARIABLE = "MOE_COMPRESSOR_MEDIA"
KINDS = ("image", "video", "audio")  # types of parts of messages
FIELDS = ("path", "url", "base64")  # fields that may hold the content of a part
PLACEHOLDER = "<image>"  # stands for a picture in the text of a chat, as in LLaVA's data sets
Part = dict[str, Any]  # a part of a message


def content_of(row: Tensor) -> bytes:
    """Return the bytes of a sequence [1, L] for a digest: token ids, and with media all other
    inputs of the forward."""
    if not isinstance(row, Inputs):
        return row.contiguous().numpy().tobytes()
    content = b""
    for name, value in [("input_ids", row.as_subclass(Tensor)), *sorted(row.more.items())]:
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        content += name.encode() + hashlib.sha256(data).digest()
    return content


def read_sequences(
    source: WeightedSource,
    tokenizer: Any,
    wanted: int,
    length: int,
    seed: int,
    vocab: int,
    purpose: Purpose = "calibration",
    strict: bool = False,
) -> tuple[Inputs, ...]:
    """Return at most `wanted` sequences of at most `length` tokens.

    Rows that cannot be read are left out with one warning, or refused if `strict`. Raises
    `CompressionError` for a model without a processor, or if no row is left."""
    name = source.source
    home = Path(tokenizer.name_or_path)
    try:
        processor = load_stock("AutoProcessor", home)
        is_usable = hasattr(processor, "create_mm_token_type_ids")
        message = "" if is_usable else "it takes no pictures beside text"
    except Exception as error:  # processors raise anything
        message = reason_of(error)
    if message:
        raise CompressionError(
            f"{home} has no usable processor for pictures ({message}); install Pillow and "
            "torchvision, copy the original model's processor there, or calibrate on its text "
            "alone (SOURCE#column)"
        )
    address = SourceSpec.parse(name)
    left_out = LeftOut(f"rows of {purpose} data {name}", strict)
    folder = Path(address.name)
    if isfile(folder):
        folder = folder.parent
    source_of_rows = source_rows(source, seed, purpose)
    rows: Iterable[Row] = source_of_rows.rows
    if not source_of_rows.is_streamed:
        rows = list(rows)
        random.Random(seed).shuffle(rows)
    sequences = list[Inputs]()
    with (
        quiet_transformers(),
        wrap_faults(f"the processor cannot take {purpose} data {name}", *REMEDIES),
    ):
        for where, row in rows:
            if len(sequences) == wanted:
                break
            with left_out.each():
                sequences.append(
                    sequence_of(row, address.column, processor, folder, length, where, left_out)
                )
    left_out.report()
    if not sequences:
        raise CompressionError(
            f"{purpose} data {name} gives no sequence; give rows that can be read"
        )
    check_vocabulary(max(int(row.max()) for row in sequences), vocab, "processor")
    return tuple(sequences)


def sequence_of(
    row: Any,
    column: str | None,
    processor: Any,
    folder: Path,
    length: int,
    where: str,
    left_out: LeftOut | None = None,
) -> Inputs:
    """Return the processed row, cut to `length` tokens; its files are in `folder`.

    Media in other columns take the place of empty parts and of `<image>`; the rest comes before the
    first message of the user. Raises `ItemError` for a picture that cannot be read, for messages
    that the template cannot take, and for a row whose pictures alone need more tokens."""
    choices = CHAT_FIRST if getattr(processor, "chat_template", None) else COLUMNS
    conversation = read_row(row, column, where, choices)
    if left_out is not None and column is None:
        note_columns(row, conversation, left_out)
    waiting = []  # media in other columns
    for kind, values in media_beside(row).items():
        several = values if isinstance(values, list | tuple) else [values]
        waiting += [{"type": kind, kind: value} for value in several if value is not None]
    messages = []
    for message in conversation.messages:
        content: Any = message["content"] or ()
        if isinstance(content, str):
            text, *others = content.split(PLACEHOLDER) if waiting else [content]
            content = [text]
            for text in others:
                content += [{"type": "image"}, text.removeprefix("\n")]
        parts = []
        for part in map(as_part, content):
            if part.get("type") == "image_url":
                url = part.get("image_url")
                url = url.get("url") if isinstance(url, Mapping) else url
                part = {"type": "image", "image": url}
            kind = part.get("type")
            if kind in KINDS and _content(part) is None:
                part = next((given for given in waiting if given["type"] == kind), None)
                if part is None:
                    raise ItemError(
                        f"{where}: its messages have more parts of type {kind} than it has {kind}s"
                    )
                waiting.remove(part)
            if kind != "text" or part.get("text"):
                parts.append(part)
        messages.append({**message, "content": parts})
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    first["content"] = [*waiting, *first["content"]]
    for message in messages:
        parts = []
        for part in message["content"]:
            kind = part.get("type")
            if kind == "image":
                part = {"type": kind, "image": _picture(_content(part), folder, where)}
            elif kind in KINDS:
                part = {"type": kind, "path": _file(_content(part), folder, where)}
            elif kind == "text":
                text, _ = first_part(processor.tokenizer, part["text"], length)
                part = {"type": kind, "text": text}
            parts.append(part)
        message["content"] = parts
    try:
        inputs = _processed(processor, messages, conversation, where)
    except ItemError:
        raise
    except Exception as error:  # templates and processors raise anything
        raise untaken(where, error, "processor") from error
    return _cut(processor, dict(inputs), length, where)


def _content(part: Part) -> Any:
    """Return the content of a part of a message; None if it is in a column beside the chat."""
    contents = (part.get(name) for name in (part["type"], *FIELDS))
    return next((content for content in contents if content is not None), None)


def _file(value: Any, folder: Path, where: str) -> str:
    """Return the path of a file in the folder of the data or in the one that the user allows, links
    followed."""
    if not isinstance(value, str) or "\0" in value:
        raise ItemError(
            f"{where}: {reprlib.repr(value)} is no picture, video or sound; give the path of its "
            "file"
        )
    for root in map(realpath, (folder, os.environ.get(MEDIA_VARIABLE, folder))):
        path = realpath(Path(root) / value)
        if isfile(path) and Path(path).is_relative_to(root):
            return path
    hint = f"put a copy there, or name its folder in {MEDIA_VARIABLE}"
    raise ItemError(f"{where}: {value} is no file in the folder of the data; {hint}")


def _picture(value: Any, folder: Path, where: str) -> Any:
    """Return a picture in RGB, from a PIL image, the bytes in a data set, base64, or a file."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    shown = f"the picture {reprlib.repr(value)}"
    try:
        if isinstance(value, str) and (len(value) >= BASE64 or value.startswith("data:")):
            value = b64decode(value.rpartition(",")[2])
        if not isinstance(value, Image.Image):
            file = BytesIO(value) if isinstance(value, bytes) else _file(value, folder, where)
            value = Image.open(file, formats=FORMATS)
        return value.convert("RGB")
    except ItemError:
        raise
    except Exception as error:  # Pillow raises anything for a broken file
        raise ItemError(
            f"{where}: {shown} cannot be read ({reason_of(error)}); mend or remove it"
        ) from error


def _processed(
    processor: Any, messages: list[Message], conversation: Conversation, where: str
) -> Any:
    """Return the processed messages; without a chat template, placeholders and the text after
    them."""
    if getattr(processor, "chat_template", None):
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return render_chat(processor, messages, conversation.tools, **options)
    text = ""
    media = defaultdict(list)
    for message in messages:
        for part in message["content"]:
            kind = part["type"]
            if conversation.text is None or kind == "audio":
                raise CompressionError(
                    f"{where} is a chat, or has sound, but the model's processor has no chat "
                    "template; put the "
                    "template of the instruct version beside it, or give rows such as {'image': "
                    "..., 'text': ...}"
                )
            if kind == "text":
                text += part["text"]
            else:
                text += getattr(processor, f"{kind}_token")
                media[f"{kind}s"].append(part.get("image") or part["path"])
    end = processor.tokenizer.eos_token or ""
    text = text.removesuffix(end) + end
    return processor(text=text, return_tensors="pt", **media)


def _cut(processor: Any, inputs: dict[str, Any], length: int, where: str) -> Inputs:
    """Return the sequence and its inputs of one value a token, cut to `length` tokens."""
    ids = inputs.pop("input_ids")
    shape = ids.shape
    if shape[1] < 2:
        raise ItemError(f"{where} gives {shape[1]} tokens; give it some text")
    media = torch.tensor(processor.create_mm_token_type_ids(ids.tolist())).view(shape) > 0
    if bool(media[:, length:].any()):
        needed = int(media[0].nonzero().max()) + 1
        raise ItemError(
            f"{where} takes {needed} tokens up to the end of its last picture, more than a "
            f"sequence's {length}; raise --sequence-length, or give smaller pictures"
        )
    more = {
        name: value[:, :length] if value.shape == shape else value
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    return Inputs.of(ids[:, :length].contiguous(), media[:, :length], more)
