"""Where a model comes from: a local folder, or a Hub id that is downloaded (or of which only headers are)."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from compressor.checkpoint import download as fetching
from compressor.checkpoint.faults import hub_fault
from compressor.checkpoint.headers import TensorInfo
from compressor.checkpoint.links import refuse_links
from compressor.checkpoint.reader import INDEX_NAME, NAME_ONE, Checkpoint
from compressor.errors import CompressionError, without_tokens
from compressor.progress import Progress, Silent

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the user named it, and where its files lie."""

    name: str  # the Hub id, or the folder's absolute path
    revision: str | None  # the commit for a Hub id; None for a folder
    folder: Path

    @property
    def label(self) -> str:
        """The name without the machine's folders, and without an access token that it may hold."""
        return without_tokens(self.name if self.revision else self.folder.name)


def is_local(model: str) -> bool:
    """Whether a model argument names something on this machine rather than on the Hub."""
    return Path(model).exists() or HUB_ID.fullmatch(model) is None


def locate(
    model: str, revision: str | None = None, progress: Progress | None = None, weights: fetching.Weights = "safetensors"
) -> ModelSource:
    """Find a local folder, or download from the Hub what a model needs, shard by shard.

    With "any" `weights` an ONNX graph will do where there are no safetensors. A link out of the folder is refused.
    """
    if not model.strip():
        raise CompressionError(f"the model's name is empty; {NAME_ONE}")
    if model.lower().endswith(".gguf") and not Path(model).is_dir():
        taking = "inspect, plan, compress and apply --model"
        raise CompressionError(f"{model} names a GGUF file, which only {taking} take; {NAME_ONE}")
    if is_local(model):
        if revision is not None:
            raise CompressionError(f"{model} is a local folder; --revision is for Hub ids only")
        if not Path(model).is_dir():
            raise CompressionError(f"{model} is not a folder; {NAME_ONE}")
        folder = Path(model).resolve()
        refuse_links(folder)
        return ModelSource(str(folder), None, folder)
    folder = fetching.download(model, revision, progress or Silent(), weights)
    return ModelSource(model, folder.name, folder)


@dataclass(frozen=True, slots=True)
class HubHeaders:
    """A Hub model's config folder and tensor places; no weight was fetched."""

    folder: Path
    revision: str
    tensors: dict[str, TensorInfo]


def fetch_headers(model: str, revision: str | None = None) -> HubHeaders:
    """config.json and the safetensors headers of a Hub model, by range requests; from the cache if need be."""
    found = fetching.find_repository(model, revision)
    if isinstance(found, Path):
        return HubHeaders(found, found.name, Checkpoint(found).tensors)
    head, small = fetching.weights_file(model, found.files), (fetching.CONFIG, INDEX_NAME)
    folder = fetching.fetch_small(found, revision, [name for name in small if name in found.files])
    fetching.shard_names(found, folder, head)
    try:
        metadata = HfApi().get_safetensors_metadata(model, revision=found.commit)
    except Exception as error:
        raise hub_fault(model, revision, error) from error
    tensors = {
        name: TensorInfo(name, file, info.dtype, tuple(info.shape), *info.data_offsets)
        for file, content in metadata.files_metadata.items()
        for name, info in content.tensors.items()
    }
    return HubHeaders(folder, found.commit, tensors)
