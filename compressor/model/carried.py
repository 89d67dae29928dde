"""What travels with the weights, loaded once as stock transformers will load it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from compressor.errors import CompressionError, reason_of
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import quiet_transformers
from compressor.records import read_object
from compressor.replaceable import TEMPLATES

GENERATION = "generation_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", f"{TEMPLATES}/*.jinja")
BESIDE = (
    *CHAT_TEMPLATES,
    "chat_template.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
OBJECTS = (
    GENERATION,
    "tokenizer.json",
    *BESIDE[-4:],
    "adapter_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
REMEDY = "mend it, or remove it from the folder"


def check_carried(folder: Path, original: Path | None = None) -> None:
    """Refuse a folder whose generation config, templates or tokenizer files stock transformers cannot load.

    A tokenizer for which none of its optional files is at fault (it needs its own code or another package) passes,
    unless the `original` folder's loads.
    """
    for name in OBJECTS:
        if (folder / name).is_file():
            read_object(folder / name)
    for path in _found(folder, CHAT_TEMPLATES):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CompressionError(f"{path} is not UTF-8 text ({error.reason}); {REMEDY}") from error
    if (folder / GENERATION).is_file():
        _check_generation(folder)
    if (fault := _tokenizer_fault(folder)) is None:
        return
    if culprit := _culprit(folder):
        raise CompressionError(f"transformers cannot load {culprit} ({reason_of(fault)}); {REMEDY}") from fault
    if original is not None and _tokenizer_fault(original) is None:
        raise CompressionError(
            f"the written tokenizer does not load, though the source's does ({reason_of(fault)}); please report this "
            "model"
        ) from fault


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _check_generation(folder: Path) -> None:
    from transformers import GenerationConfig

    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever its fields make it raise
        raise CompressionError(
            f"transformers cannot load {folder / GENERATION} ({reason_of(error)}); {REMEDY}"
        ) from error


def _tokenizer_fault(folder: Path) -> BaseException | None:
    """Why the folder's tokenizer does not load; None if it does."""
    try:
        load_tokenizer(folder)
    except CompressionError as error:
        return error.__cause__ or error
    return None


def _culprit(folder: Path) -> Path | None:
    """The optional file of the tokenizer without which, and the ones before it, the rest loads."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and "auto_map" in read_object(config):
        return None  # of its own code, which is never run
    left = {path.relative_to(folder): path for pattern in ("*", CHAT_TEMPLATES[1]) for path in folder.glob(pattern)}
    for path in _found(folder, BESIDE):
        del left[path.relative_to(folder)]
        with TemporaryDirectory() as scratch:
            for place, source in left.items():
                if source.is_file() and source.suffix != ".safetensors":
                    (Path(scratch) / place).parent.mkdir(exist_ok=True)
                    (Path(scratch) / place).symlink_to(source.resolve())
            if _tokenizer_fault(Path(scratch)) is None:
                return path
    return None
