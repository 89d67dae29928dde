"""Where a model comes from: a local folder, or a Hub id that is downloaded (or of which only headers are)."""

import re
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint import INDEX_NAME, SINGLE_NAME, TensorInfo
from compressor.errors import CompressionError, first_line

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DOWNLOADS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "additional_chat_templates/*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the user named it, and where its files lie."""

    name: str  # the Hub id, or the folder's absolute path
    revision: str | None  # the commit for a Hub id; None for a folder
    folder: Path

    @property
    def label(self) -> str:
        """The name without the machine's folders."""
        return self.name if self.revision else self.folder.name


def is_local(model: str) -> bool:
    """Whether a model argument names something on this machine rather than on the Hub."""
    return Path(model).exists() or HUB_ID.fullmatch(model) is None


def _hub_fault(model: str, revision: str | None, error: Exception) -> CompressionError:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, GatedRepoError):
        return CompressionError(
            f"{model} is gated on the Hub; ask for access on its page and log in with `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return CompressionError(f"{model} has no revision {revision!r} on the Hub; check --revision")
    if isinstance(error, RepositoryNotFoundError):
        return CompressionError(
            f"{model!r} is neither a folder here nor a model on the Hub; check the name, or log in if it is private"
        )
    if isinstance(error, EntryNotFoundError):
        return CompressionError(f"{model}{at} lacks a file that is needed on the Hub: {first_line(error)}")
    reason = first_line(error)
    return CompressionError(
        f"{model!r} is no folder here, and the Hub could not be asked for it ({reason}); check the path or the network"
    )


def locate(model: str, revision: str | None = None) -> ModelSource:
    """Find a local folder, or download a Hub model's configs, tokenizer and safetensors files."""
    if not model.strip():
        raise CompressionError(
            "the model's name is empty; name a local checkpoint folder or a Hub id such as org/model"
        )
    if is_local(model):
        if revision is not None:
            raise CompressionError(f"{model} is a local folder; --revision is for Hub ids only")
        folder = Path(model)
        if not folder.is_dir():
            raise CompressionError(
                f"{model} is not a folder; name a local checkpoint folder or a Hub id such as org/model"
            )
        return ModelSource(str(folder.resolve()), None, folder.resolve())
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(model, revision=revision).sha or revision or "main"
        folder = Path(snapshot_download(model, revision=commit, allow_patterns=list(DOWNLOADS)))
    except Exception as error:
        raise _hub_fault(model, revision, error) from error
    return ModelSource(model, commit, folder)


@dataclass(frozen=True, slots=True)
class HubHeaders:
    """A Hub model's config folder and tensor places; no weight was fetched."""

    folder: Path
    revision: str
    tensors: dict[str, TensorInfo]


def fetch_headers(model: str, revision: str | None = None) -> HubHeaders:
    """config.json and the safetensors headers of a Hub model, by range requests."""
    from huggingface_hub import HfApi, hf_hub_download

    api = HfApi()
    try:
        commit = api.model_info(model, revision=revision).sha or revision or "main"
        config = Path(hf_hub_download(model, "config.json", revision=commit))
        if not (
            api.file_exists(model, SINGLE_NAME, revision=commit) or api.file_exists(model, INDEX_NAME, revision=commit)
        ):
            raise CompressionError(
                f"{model} has no safetensors weights on the Hub; pickle checkpoints are refused, convert it first"
            )
        metadata = api.get_safetensors_metadata(model, revision=commit)
    except CompressionError:
        raise
    except Exception as error:
        raise _hub_fault(model, revision, error) from error
    tensors = {
        name: TensorInfo(name, file, info.dtype, tuple(info.shape), *info.data_offsets)
        for file, content in metadata.files_metadata.items()
        for name, info in content.tensors.items()
    }
    return HubHeaders(config.parent, commit, tensors)
