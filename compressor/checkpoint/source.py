"""Sources of models: a local folder, or a Hub id whose files, or headers alone, are downloaded.

Downloads go into the Hub's own cache: small files first, then only the shards that the index names.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects, tqdm

from compressor.checkpoint.reader import (
    CONFIG,
    INDEX_END,
    MODELOPT,
    SINGLE_NAME,
    Checkpoint,
    TensorInfo,
    find_head,
    named_head,
    read_weight_map,
    refuse_links,
)
from compressor.distributed import ranks
from compressor.entry_points import kind_of_file
from compressor.errors import CompressionError, reason_of, without_tokens
from compressor.files import NAME_ONE, SUMS, TEMPLATES, is_local, json_object
from compressor.frozen import frozen
from compressor.progress import Progress, Silent

PASSING = (408, 429)  # temporary answers: too slow, too many requests


def hub_error(
    model: str, revision: str | None, error: Exception, file: str | None = None
) -> CompressionError:
    """Return the error for an exception of the Hub client about one `file`, or about the model as a
    whole."""
    not_here = isinstance(error, errors.LocalEntryNotFoundError)  # its cause says more
    reason = reason_of(error.__cause__ or error if not_here else error)
    if isinstance(error, errors.GatedRepoError):
        message = "is gated on the Hub; ask for access on its page and log in with `hf auth login`"
        return CompressionError(f"{model} {message}")
    if isinstance(error, errors.RevisionNotFoundError):
        return CompressionError(
            f"{model} has no revision {revision!r} on the Hub; check --revision"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CompressionError(
            f"{model!r} is neither a folder here nor a model on the Hub; check the name, or log in "
            "if it is private"
        )
    if file is not None:
        return CompressionError(
            f"{file} of {model} could not be downloaded ({reason}); run the same command again to "
            "go on"
        )
    return CompressionError(
        f"{model!r} is no folder here, and the Hub could not be asked for it ({reason}); check the "
        "path or the network"
    )


logger = logging.getLogger(__name__)

COMPANIONS = (
    *("*.json", "*.jinja", f"{TEMPLATES}/*"),
    *("*.model", "*.txt", "*.tiktoken", "*.vocab", "*.spm", "*.bpe"),  # tokenizers of all ages
    *("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", SUMS),
)
CARD = "README.md"  # names the licence
NOT_COMPANIONS = (".md", ".index.json", ".safetensors", ".bin", ".onnx", ".py")
STEP_BYTES = 10**6  # one step of the progress
REQUESTS = 8  # simultaneous requests for headers
TRIES = 3  # the Hub client resumes after most interruptions, but not after a reset
PAUSE_SECONDS = 1.0
SILENT = Silent()


@frozen
class ModelRepository:
    """A model's repository at one commit: the files at its top, and its chat templates."""

    model: str
    commit: str
    files: Mapping[str, RepoFile]


def find_repository(model: str, revision: str | None) -> ModelRepository | Path:
    """Return the repository, by two or three small requests; if unreachable, a complete copy in the
    cache."""
    api = HfApi()
    try:
        commit = api.model_info(model, revision=revision).sha or revision or "main"
        entries = list(api.list_repo_tree(model, revision=commit))
        if any(entry.path == TEMPLATES for entry in entries):
            entries += api.list_repo_tree(model, TEMPLATES, revision=commit)
        return ModelRepository(
            model, commit, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        )
    except Exception as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 500
        refused = status < 500 and status not in PASSING  # otherwise the Hub is unreachable or down
        # as last seen
        cached = None if refused else try_to_load_from_cache(model, CONFIG, None, revision)
        if not isinstance(cached, str):
            raise hub_error(model, revision, error) from error
        folder = Path(cached).parent
        names = {path.name for path in folder.iterdir()}
        head = named_head(names, json_object(folder / CONFIG)) or SINGLE_NAME
        missing = [name for name in _weight_files(folder, head) if name not in names]
        if missing:
            raise CompressionError(
                f"{model}: {missing[0]} is not in the cache, and the Hub could not be asked for it "
                f"({reason_of(error)}); run the command again with a network"
            ) from error
        logger.warning(
            "the Hub could not be asked for %s; its cached commit %s is used", model, folder.name
        )
        return folder


def weights_file(repository: ModelRepository, revision: str | None) -> str:
    """Return the file that holds the weights or says where they are.

    Raises `CompressionError` if there is none to read.
    """
    names = repository.files
    where = f"{repository.model} on the Hub"
    if CONFIG in names:
        config = json_object(fetch_small(repository, revision, [CONFIG]) / CONFIG)
        return find_head(where, names, config)
    find_head(where, names, {})  # which refuses what is no checkpoint at all
    raise CompressionError(
        f"{where} has no {CONFIG}; name the repository of a transformers checkpoint"
    )


def companions(names: Collection[str]) -> list[str]:
    """Return the small files to read or to copy with the weights, in the order in which they are
    fetched."""
    matching = filter_repo_objects(names, allow_patterns=list(COMPANIONS))
    small = {name for name in matching if not name.endswith(NOT_COMPANIONS)}
    return sorted(small | ({CARD} & {*names}), key=lambda name: (name != CONFIG, name))


def fetch_small(repository: ModelRepository, revision: str | None, names: Sequence[str]) -> Path:
    """Fetch some files and return their folder; the cache notes which commit the revision was."""
    if revision != repository.commit:
        _fetch(repository.model, names[0], revision)
    paths = [_fetch(repository.model, name, repository.commit) for name in names]
    return paths[0].parents[names[0].count("/")]


def shard_names(repository: ModelRepository, folder: Path, head: str) -> list[str]:
    """Return the weight files in order; raises `CompressionError` if the Hub lacks one that the
    index names."""
    names = _weight_files(folder, head)
    for name in names:
        if name not in repository.files:
            raise CompressionError(
                f"{repository.model}: {head} names the shard {name!r}, which is missing on the "
                "Hub; ask its owner to upload it, or choose another --revision"
            )
    return names


def _weight_files(folder: Path, head: str) -> list[str]:
    """Return the shards of a fetched index; of a single file of weights, itself."""
    if not head.endswith(INDEX_END):
        return [head]
    return sorted(set(read_weight_map(folder / head).values()))


def _cached_size(folder: Path, file: RepoFile) -> int | None:
    """Return the bytes of a file in the cache, from this commit or another one with the same
    content."""
    tag: str = file.lfs.sha256 if file.lfs else file.blob_id  # the name of its bytes in the cache
    for path in (folder / file.path, folder.parent.parent / "blobs" / tag):
        if path.is_file():
            return path.stat().st_size
    return None


def steps(nbytes: int) -> int:
    """Return the progress steps of a file."""
    return max(1, -(-nbytes // STEP_BYTES))


def _fetch(
    model: str,
    name: str,
    revision: str | None,
    progress: Progress = SILENT,
    size: int = 0,
    again: bool = False,
) -> Path:
    """Return one file's path in the cache, downloaded if need be, with the progress of its
    bytes."""
    left = steps(size)

    class Bar(tqdm):  # draws nothing; the Hub client may use several at once for one file
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal left
            self.n += n or 0
            # the last step is done when the file is in place
            while left > max(1, steps(size) - int(self.n) // STEP_BYTES):
                left -= 1
                progress.advance(name)

    for tries in reversed(range(TRIES)):
        try:
            path = hf_hub_download(
                model, name, revision=revision, tqdm_class=Bar, force_download=again
            )
        except Exception as error:
            # the Hub's answers, the disk's, wrong names
            if tries == 0 or isinstance(error, (OSError, ValueError)):
                raise hub_error(model, revision, error, name) from error
            time.sleep(PAUSE_SECONDS)
        else:
            break
    for _ in range(left):
        progress.advance(name)
    return Path(path)


@frozen
class ModelSource:
    """A model as the user named it, and the folder of its files."""

    name: str  # the Hub id, or the folder's absolute path
    revision: str | None  # the commit for a Hub id; None for a folder
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> Self:
        """A model in a folder."""
        return cls(str(folder), None, folder)

    @property
    def label(self) -> str:
        """The name without the machine's folders, and without an access token that it may hold."""
        return without_tokens(self.name if self.revision else self.folder.name)


def locate(
    model: str,
    revision: str | None = None,
    progress: Progress | None = None,
    weights: bool = True,
) -> ModelSource:
    """Find a local folder, or download a model from the Hub, shard by shard, or without its
    `weights`; links out of a folder are refused.

    The folder of a download lies in the cache, named after the commit. If the Hub is unreachable, a
    complete copy there is used. Raises `CompressionError`."""
    if not model.strip():
        raise CompressionError(f"the model's name is empty; {NAME_ONE}")
    kind = kind_of_file(model)
    if kind is not None and not Path(model).is_dir():
        raise CompressionError(
            f"{model} names a {kind.upper()} file, which only inspect, plan, compress and apply "
            f"--model take; {NAME_ONE}"
        )
    if is_local(model):
        if revision is not None:
            raise CompressionError(f"{model} is a local folder; --revision is for Hub ids only")
        if not Path(model).is_dir():
            raise CompressionError(f"{model} is not a folder; {NAME_ONE}")
        folder = Path(model).resolve()
        refuse_links(folder)
        return ModelSource.of(folder)
    repository = find_repository(model, revision)
    if isinstance(repository, Path):
        return ModelSource(model, repository.name, repository)
    small = companions(repository.files)
    if not weights:
        return ModelSource(model, repository.commit, fetch_small(repository, revision, small))
    head = weights_file(repository, revision)
    if head.endswith(INDEX_END) or not small:
        small = [head, *small]
    folder = fetch_small(repository, revision, small)
    wanted = [repository.files[name] for name in shard_names(repository, folder, head)]
    missing = [file for file in wanted if _cached_size(folder, file) != file.size]
    progress = progress or SILENT
    if missing:
        progress.start("download (MB)", sum(steps(file.size) for file in missing))
    for file in missing:
        is_damaged = _cached_size(folder, file) is not None
        _fetch(model, file.path, repository.commit, progress, file.size, again=is_damaged)
    for file in wanted:  # links files that the cache has for another commit
        _fetch(model, file.path, repository.commit)
    return ModelSource(model, folder.name, folder)


def find_model(
    model: str, revision: str | None = None, progress: Progress | None = None
) -> ModelSource:
    """Locate a model; of several processes the first one downloads it."""
    return ranks().first_before_others(lambda: locate(model, revision, progress))


def fetch_headers(model: str, revision: str | None = None) -> Checkpoint:
    """Return a Hub model without its weights: headers come by range requests, or from the cache.

    Its folder is named after the commit.
    """
    repository = find_repository(model, revision)
    if isinstance(repository, Path):
        return Checkpoint(repository)
    head = weights_file(repository, revision)
    small = [CONFIG, *({MODELOPT} & repository.files.keys())]
    if head.endswith(INDEX_END):
        small.append(head)
    folder = fetch_small(repository, revision, small)
    files = shard_names(repository, folder, head)
    read = partial(HfApi().parse_safetensors_file_metadata, model, revision=repository.commit)
    try:
        with ThreadPoolExecutor(REQUESTS) as pool:
            headers = [*pool.map(read, files)]
    except Exception as error:
        raise hub_error(model, revision, error) from error
    tensors = {}
    for file, header in zip(files, headers, strict=True):
        for name, info in header.tensors.items():
            tensors[name] = TensorInfo(
                name, file, info.dtype, tuple(info.shape), *info.data_offsets
            )
    return Checkpoint(folder, tensors)
