"""Calibration data: text from a file, a `datasets` id or the demo, packed into sequences of equal length."""

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressor.errors import CompressionError, first_line, reason_of

logger = logging.getLogger(__name__)

DEFAULT_SOURCE = "allenai/c4"  # the papers' choice; its config "en" is used
DEMO_SOURCE = "demo"
SHUFFLE_BUFFER = 10_000  # documents of a streamed data set that are shuffled together


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids ready to run. `batches` are [B, L]; only the last one may be shorter. There is no padding."""

    batches: tuple[torch.Tensor, ...]
    identity: dict[str, Any]  # source, samples, sequence length, tokens, seed and the SHA-256 of the token ids

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches."""
        return sum(batch.numel() for batch in self.batches)


def _document(entry: Any, tokenizer: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: each line should be a JSON object with 'text' or 'messages'")
    if isinstance(entry.get("text"), str):
        return str(entry["text"])
    if isinstance(entry.get("messages"), list):
        if not getattr(tokenizer, "chat_template", None):
            raise CompressionError(
                f"{where} has 'messages', but the tokenizer has no chat template; give it lines with 'text'"
            )
        try:
            return str(tokenizer.apply_chat_template(entry["messages"], tokenize=False))
        except Exception as error:  # a template raises what it likes
            raise CompressionError(
                f"{where}: the chat template cannot take these messages ({reason_of(error)}); mend or remove them"
            ) from error
    raise CompressionError(f"{where} has neither 'text' nor 'messages'; rename the field that holds the text")


def _file_documents(path: Path, tokenizer: Any) -> list[str]:
    """Documents of a JSONL file, or of a text file whose documents are separated by blank lines."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CompressionError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error
    except OSError as error:
        raise CompressionError(f"calibration file {path} cannot be read: {error.strerror}") from error
    if path.suffix not in (".jsonl", ".json"):
        return [part.strip("\n") + "\n" for part in content.split("\n\n") if part.strip()]
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):  # not splitlines: JSON text may hold U+2028
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CompressionError(
                    f"{path}, line {number} is not valid JSON ({error}); mend or remove it"
                ) from error
            documents.append(_document(entry, tokenizer, f"{path}, line {number}"))
    return [document for document in documents if document.strip()]


def _dataset_documents(source: str, seed: int, tokenizer: Any) -> Iterator[str]:
    """Documents of a `datasets` id, streamed; `id:config` names a configuration."""
    import datasets

    name, _, config = source.partition(":")
    if source == DEFAULT_SOURCE:
        config = "en"
    try:
        stream = datasets.load_dataset(name, config or None, split="train", streaming=True)
        shuffled = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        for entry in shuffled:
            yield _document(entry, tokenizer, f"data set {source}")
    except CompressionError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise CompressionError(
            f"calibration data {source!r} is no file, and cannot be read as a data set ({reason}); "
            "pass --calibration with a text or JSONL file, a data set id, or 'demo'"
        ) from error


def _documents(source: str, seed: int, tokenizer: Any) -> Iterable[str]:
    path = Path(source)
    if source == DEMO_SOURCE and not path.exists():
        from compressor.demo.evaluation import load_documents

        found = [text for text, _ in load_documents("calibration")]
    elif path.is_file():
        found = _file_documents(path, tokenizer)
    elif path.is_dir():
        raise CompressionError(
            f"calibration {source or '.'} is a folder; name a text or JSONL file in it, or a data set id"
        )
    elif path.suffix in (".txt", ".jsonl", ".json"):
        raise CompressionError(
            f"calibration file {source} does not exist; name a text or JSONL file, a data set id, or 'demo'"
        )
    else:
        return _dataset_documents(source, seed, tokenizer)
    if not found:
        raise CompressionError(f"calibration file {source} is empty; give it some text")
    random.Random(seed).shuffle(found)
    return found


def _end_of_text(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def pack(documents: Iterable[str], tokenizer: Any, samples: int, length: int) -> torch.Tensor:
    """Token ids of the documents, each ended by the end-of-text token, as one row of at most samples * length ids."""
    wanted, separator, ids = samples * length, _end_of_text(tokenizer), list[int]()
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False)["input_ids"] + separator
        if len(ids) >= wanted:
            break
    return torch.tensor(ids[:wanted], dtype=torch.long)


def cut(ids: torch.Tensor, length: int, batch_size: int) -> tuple[torch.Tensor, ...]:
    """[T] -> batches [B, length]; what does not fill a sequence is its own last batch only if there is nothing else."""
    whole = ids.numel() // length
    if whole == 0:
        return (ids[None],)
    return tuple(ids[: whole * length].view(whole, length).split(batch_size))


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer; raises `CompressionError` if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = first_line(error)
        raise CompressionError(
            f"{folder} has no usable tokenizer ({reason}); calibration needs one, model-centric does not"
        ) from error


def calibrate(
    source: str, tokenizer: Any, *, samples: int, length: int, seed: int, vocab: int, batch_size: int = 8
) -> Calibration:
    """Read, shuffle, tokenise and pack calibration text; raises `CompressionError` if there is none."""
    if samples < 1 or length < 2:
        raise CompressionError(
            f"--samples {samples} and --sequence-length {length} leave nothing to run; give at least 1 and 2"
        )
    previous, tokenizer.model_max_length = tokenizer.model_max_length, 10**30  # packed text is long: no warning
    try:
        ids = pack(_documents(source, seed, tokenizer), tokenizer, samples, length)
    finally:
        tokenizer.model_max_length = previous
    if ids.numel() < 2:
        raise CompressionError(f"calibration data {source} gives {ids.numel()} tokens; give it more text")
    if int(ids.max()) >= vocab:
        raise CompressionError(
            f"the tokenizer makes token {int(ids.max())}, the model knows {vocab}; they do not belong together"
        )
    batches = cut(ids, length, batch_size)
    used = sum(batch.numel() for batch in batches)
    if used < samples * length:
        logger.warning("calibration data %s fills %d of %d tokens asked for", source, used, samples * length)
    digest = hashlib.sha256(torch.cat([batch.reshape(-1) for batch in batches]).numpy().tobytes()).hexdigest()
    identity = {
        "source": source,
        "samples": sum(len(batch) for batch in batches),
        "sequence_length": batches[0].shape[1],
        "tokens": used,
        "seed": seed,
        "sha256": digest,
    }
    return Calibration(batches, identity)


def sample_positions(tokens: int, count: int, seed: int) -> torch.Tensor:
    """Positions [S] of a sample of the calibration tokens, sorted; they do not depend on how batches are cut."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:count].sort().values
