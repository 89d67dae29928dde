"""receipt.json: how far an output is from its base on held-out text, and all that repeats the
figures: token ids, digests of both models, device and versions.

Another device rounds otherwise. How much that changes is estimated in the comparison itself: some
sequences pass the output once more, where what its modules return is moved by up to half a unit in
the last place. The band of a figure is four times the root mean square, over these
sequences, of what that changes."""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, fields, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.checkpoint.digests import digest_of
from compressor.checkpoint.reader import CONFIG, Checkpoint
from compressor.checkpoint.source import ModelSource, find_model
from compressor.data.batches import EvaluationSet
from compressor.devices import device_name
from compressor.divergence.evaluator import Evaluator, Figures
from compressor.document.blocks import Block, Facts, Table, Text
from compressor.errors import CompressionError, without_tokens
from compressor.files import RECEIPT
from compressor.formatting import label
from compressor.frozen import frozen
from compressor.model.constant_experts import declared
from compressor.model.inputs import Inputs
from compressor.model.opened import open_model
from compressor.model.streaming import TINY
from compressor.model.substitution import AS_IT_IS, Substitution
from compressor.progress import SILENT, Progress
from compressor.records import RESTORE, Count, Finite, plain_json, read_as, read_json, read_object
from compressor.run_record import versions
from compressor.steps.constants.step import read_constants

FORMAT = "moe-compressor-receipt/1"
MOST_BYTES = 2**22  # of a file
MOST_TOKEN_BYTES = 10**6  # of the token ids, as JSON
DIGITS = 6  # of a figure
MOVED = 8  # sequences by which the band is estimated
TIMES = 4.0  # of what rounding otherwise changes
EXACT = 1e-5  # nats, or share of tokens, that any device leaves open
FLIPS = 2  # tokens that may turn on any device
Batch = tuple[tuple[Count, ...], ...]  # token ids [B, L]


@frozen
class ReceiptFigures:
    """Figures over all predicted tokens; KL and losses in nats per token."""

    kl: Finite  # mean of KL(base || output) over the vocabulary
    kl_median: Finite
    kl_p95: Finite
    kl_p99: Finite
    kl_largest: Finite
    agreement: Finite  # share of tokens at which both models' most probable next token is the same
    base_loss: Finite
    loss: Finite

    @classmethod
    def of(cls, by_token: Tensor) -> "ReceiptFigures":
        """Return the figures of KL, loss, flip and base's loss of each token, [N, 4]."""
        kl, loss, flips, base_loss = by_token.double().T
        shares = torch.tensor([0.5, 0.95, 0.99], dtype=torch.float64)
        means = 1 - flips.mean(), base_loss.mean(), loss.mean()
        values = kl.mean(), *kl.quantile(shares), kl.max(), *means
        # no -0.0 for a KL that rounding has taken below 0
        return cls(*(round(float(value), DIGITS) + 0.0 for value in values))


@frozen
class ReceiptBase:
    """The model that the output was compared with."""

    model: str
    revision: str | None  # the commit of a Hub id
    files: Mapping[str, str]  # SHA-256 of config.json and of each file of weights


@frozen
class Receipt:
    """The figures of an output, with all that repeats them."""

    format: Literal["moe-compressor-receipt/1"]
    figures: ReceiptFigures
    band: ReceiptFigures  # how far each figure may be off on another device
    tokens: Count  # that are predicted: all of each sequence but the first
    sha256: str  # of `text`, as JSON without blanks
    base: ReceiptBase
    output: Mapping[str, str]  # as `files` of the base
    dtype: Literal["float32", "bfloat16", "float16"]  # that both models computed in
    device: str
    versions: Mapping[str, str]
    text: Mapping[str, tuple[Batch, ...]]  # batches of token ids [B, L] by source


def text_digest(text: Mapping[str, Any]) -> str:
    """SHA-256 of the token ids, their batches and the names of their sources."""
    return hashlib.sha256(json.dumps(text, separators=(",", ":")).encode()).hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's config and of each file of weights, all of which are read."""
    tensors = Checkpoint(folder).tensors
    names = sorted({CONFIG, *(info.file for info in tensors.values())})
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: digest_of(folder / name)[0], names)
        return dict(zip(names, digests, strict=True))


@contextmanager
def as_elsewhere(model: Any, decoder_layer: str) -> Iterator[None]:
    """Move what attention, experts and norms of a decoder layer return by up to half a unit in the
    last place of each number, as another order of adding up may."""

    def move(name: str, _: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not (isinstance(hidden, Tensor) and hidden.is_floating_point()):
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.rand(hidden.shape, generator=generator).to(hidden.device) - 0.5
        step = torch.finfo(hidden.dtype).eps
        moved = (hidden.float() * (1 + step * noise)).to(hidden.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    with ExitStack() as hooks:
        for name, module in model.get_submodule(decoder_layer).named_children():
            hook = partial(move, f"{decoder_layer}.{name}")
            hooks.enter_context(module.register_forward_hook(hook))
        yield


def measure_output(
    evaluator: Evaluator, folder: Path, progress: Progress = SILENT
) -> tuple[Figures, Figures]:
    """Return the figures of the model in a folder, which may have constants, and of a few batches
    as another device may compute them."""
    settings = evaluator.base.dtype_name, str(evaluator.base.partial.device)
    variant = AS_IT_IS
    if declared(read_object(folder / CONFIG)):
        output, constants = read_constants(folder, *settings)
        variant = Substitution(constants=constants)
    else:
        output = open_model(ModelSource(str(folder), None, folder), *settings)
    variants = variant, replace(variant, around=as_elsewhere)
    only = range(len(evaluator.batches)), _moved_batches(evaluator)
    figures, moved = evaluator.measure(output, variants, progress=progress, only=only)
    return figures, moved


def _moved_batches(evaluator: Evaluator) -> range:
    """Return the numbers of the batches, throughout the text, with about so many sequences as the
    band is estimated on."""
    wanted = -(-MOVED // len(evaluator.batches[0]))
    return range(0, len(evaluator.batches), -(-len(evaluator.batches) // wanted))


def _tokens(figures: Figures, sequences: Iterable[int]) -> Tensor:
    """Return the figures of all tokens of these sequences, [N, 4]."""
    return torch.cat([figures.by_token[row, : figures.tokens[row]] for row in sequences])


def make_receipt(
    evaluator: Evaluator, figures: Figures, moved: Figures, folder: Path
) -> Receipt | None:
    """Return the receipt of the output in a folder, by both results of `measure_output`; None if
    all of its text has media.

    Where token ids take more than 1 MB, batches are left out throughout the text, and the figures
    are those of the others."""
    batches = evaluator.batches
    sizes = [0 if isinstance(batch, Inputs) else len(str(batch.tolist())) for batch in batches]
    text = dict[str, list[Any]]()
    recorded = list[int]()
    share = min(1.0, MOST_TOKEN_BYTES / max(sum(sizes), 1))
    ends = [*accumulate(map(len, batches))]
    read = written = 0
    for number, (batch, size, end) in enumerate(zip(batches, sizes, ends, strict=True)):
        read += size
        if 0 < size <= share * read - written:
            written += size
            name = without_tokens(evaluator.names[evaluator.domains[number]])
            text.setdefault(name, []).append(batch.tolist())
            recorded += range(end - len(batch), end)
    if not recorded:
        return None
    totals = ReceiptFigures.of(_tokens(figures, recorded))
    sequences = list[int]()
    for number in _moved_batches(evaluator):
        sequences += range(ends[number] - len(batches[number]), ends[number])
    pairs = list[Tensor]()
    for row, sequence in enumerate(sequences):
        both = _tokens(figures, [sequence]), _tokens(moved, [row])
        pairs.append(torch.tensor([astuple(ReceiptFigures.of(tokens)) for tokens in both]))
    values = torch.stack(pairs)  # [n, 2, figures]
    change = values.diff(dim=1).square().mean((0, 1)).sqrt()
    # a figure of all text, such as the largest KL, may be larger than those of sequences
    scale = values.square().mean((0, 1)).sqrt().clamp(min=TINY)
    change *= (torch.tensor(astuple(totals)) / scale).clamp(min=1)
    band = ReceiptFigures(*(round(value, DIGITS) for value in (TIMES * change + EXACT).tolist()))
    tokens = int(figures.tokens[recorded].sum())
    agreement = round(band.agreement + FLIPS / tokens, DIGITS)
    source = evaluator.base.source
    content = {
        "format": FORMAT,
        "figures": totals,
        # the base was not moved, and loses as the output does
        "band": replace(band, agreement=agreement, base_loss=band.loss),
        "tokens": tokens,
        "sha256": text_digest(text),
        "base": ReceiptBase(label(source.label), source.revision, file_digests(source.folder)),
        "output": file_digests(folder),
        "dtype": evaluator.base.dtype_name,
        "device": device_name(evaluator.base.partial.device),
        "versions": versions(),
        "text": text,
    }
    return read_as(Receipt, plain_json(content))


def read_receipt(path: Path) -> Receipt:
    """Read a receipt; raises `CompressionError` for a file that holds something else, or other
    token ids than it says."""
    content = read_json(path, RESTORE, RESTORE, MOST_BYTES)
    receipt = read_as(Receipt, content, f"{path}: ", closed=True)
    tokens = 0
    for batch in chain.from_iterable(receipt.text.values()):
        if len({*map(len, batch)}) != 1:
            raise CompressionError(f"{path}: sequences of a batch differ in length; {RESTORE}")
        tokens += len(batch) * (len(batch[0]) - 1)
    if text_digest(content["text"]) != receipt.sha256 or tokens != receipt.tokens or tokens < 1:
        raise CompressionError(
            f"{path}: its token ids are not those of its digest and their number; {RESTORE}"
        )
    return receipt


@frozen
class ReceiptVerdict:
    """A receipt, and its figures computed once more."""

    path: str
    receipt: Receipt
    figures: ReceiptFigures
    device: str
    versions: Mapping[str, str]

    @property
    def verdict(self) -> Literal["same", "within the band", "different"]:
        if self.figures == self.receipt.figures:
            return "same"
        columns = astuple(self.figures), astuple(self.receipt.figures), astuple(self.receipt.band)
        # a figure that is not finite is in no band
        inside = [abs(here - there) <= band for here, there, band in zip(*columns, strict=True)]
        return "within the band" if all(inside) else "different"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types, without the text."""
        content: dict[str, Any] = plain_json(self)
        del content["receipt"]["text"]
        return {**content, "verdict": self.verdict}

    def blocks(self) -> list[Block]:
        """Return the verdict, and each figure beside the receipt's."""
        sentence = {
            "same": f"These are the figures of {self.path}.",
            "within the band": f"The figures of {self.path} come out within its band.",
            "different": f"These are not the figures of {self.path}.",
        }[self.verdict]
        rows = []
        for entry in fields(ReceiptFigures):
            columns = self.receipt.figures, self.figures, self.receipt.band
            numbers = [f"{getattr(column, entry.name):.6f}" for column in columns]
            rows.append((entry.name.replace("_", " "), *numbers))
        table = Table("Figures", ("", "receipt", "here", "band"), rows)
        devices = Facts((("Device of the receipt", self.receipt.device), ("Here", self.device)))
        return [Text(sentence), table, devices]


def repeat_receipt(
    folder: Path, base: str, device: str = "auto", progress: Progress = SILENT
) -> ReceiptVerdict:
    """Compute the figures of an output's receipt once more, from its token ids.

    Raises `CompressionError` for a folder without a receipt, and for an output or a base of which a
    file is not the receipt's."""
    path = folder / RECEIPT
    if not path.is_file():
        raise CompressionError(
            f"{folder} has no {RECEIPT}, which compress writes if it evaluates the output on text"
        )
    receipt = read_receipt(path)
    source = find_model(
        base, receipt.base.revision if base == receipt.base.model else None, progress
    )
    for place, expected, hint in (
        (folder, receipt.output, "restore the output"),
        (source.folder, receipt.base.files, f"name {receipt.base.model} with --base"),
    ):
        differing = {*file_digests(place).items()} ^ {*expected.items()}
        if differing:
            raise CompressionError(
                f"{place / min(differing)[0]} is not the file of {path}, by its digest; {hint}"
            )
    model = open_model(source, receipt.dtype, device)
    sets = []
    for name, batches in receipt.text.items():
        tensors = tuple(map(torch.tensor, batches))
        if max(int(batch.max()) for batch in tensors) >= model.vocabulary:
            raise CompressionError(f"{path} has token ids that {base} does not know; {RESTORE}")
        sets.append(EvaluationSet(name, tensors))
    evaluator = Evaluator(model, sets, by_token=True)
    figures, _ = measure_output(evaluator, folder, progress)
    by_token = _tokens(figures, range(figures.sequences))
    device = device_name(model.partial.device)
    return ReceiptVerdict(str(path), receipt, ReceiptFigures.of(by_token), device, versions())
