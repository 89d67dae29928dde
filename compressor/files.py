"""Files and folders that are complete or absent, written by one run at a time, and the rules of
overwriting.

A run holds a hidden folder beside its output until it ends or is killed, or inside an empty folder
or a mount point, to which the content then moves. --overwrite replaces what this tool wrote, by its
records, or nothing but a checkpoint."""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from compressor import entry_points
from compressor.errors import CompressionError
from compressor.records import read_json

FULL = (errno.ENOSPC, errno.EDQUOT)
# fields of comparison.json and attribution.json; other files name their format
REPORTED = ("rows", "senders")
LOCK = "lock"
OUTPUT = "output"  # the new output
# where an older output lies between the two renames that put a new one in its place
REPLACED = "replaced"
ARRIVING = "arriving"  # an output whose content is on its way into a folder that stays
LOST = "lost+found"  # in the root of a file system
TOOL = "moe-compressor"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
NAME_ONE = "name a local checkpoint folder or a Hub id such as org/model"
GRAPH = "model.onnx"  # of an ONNX export
# names of files may hold what UTF-8 cannot; this is what JSON writes for it
LONE_HALVES = "backslashreplace"
SUMS = "SHA256SUMS"  # digests of an output's files
GOLDEN = "golden_answers.json"  # what the model answers, by which a copy is known
RECEIPT = "receipt.json"  # how far the output is from its base, to be repeated by anyone
RECORDS = ("compression.json", "onnx_export.json")  # the records in an output of this tool
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of such a picture
PAGE_END = 2_000  # bytes at a page's end that hold who made it
TEMPLATES = "additional_chat_templates"  # the one sub-folder that loaders read
WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx\.data)")
BESIDE = re.compile(
    r"(.+[_-])?(config|tokenizer|template|params)\.json|(special_tokens_map"
    r"|added_tokens|vocab|gate|golden_answers|receipt)\.json"
    r"|.+\.index\.json|(vocab|merges)\.txt|.+\.(tiktoken|spm|bpe|codes|jinja)"
    r"|.*(tokenizer|spiece|sentencepiece).*\.model"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
    r"|recipe\.yaml|\.git(attributes|ignore)"
    r"|(readme|licen[cs]e|notice|copying|use_policy|acceptable_use_policy)([._-].*)?",
    re.IGNORECASE,
)
REPORTS = re.compile(  # what other commands may have added to an output
    r"(gate|graph|hubs|attribution|comparison)\.(json|md|xml|png|graphml)"
    r"|(influence|scores|experts|causal|sizes|similarity|visits|errors|times"
    r"|distillation|active)\.png"
)
MADE_BY = "Made by moe-compress"  # at the end of every page
MOST_NAMED = 3  # stray files in one sentence
_held: set[tuple[Path, int]] = set()  # by this process, with the thread


def is_local(model: str) -> bool:
    """Return True if a model argument names something on this machine rather than on the Hub."""
    return Path(model).exists() or HUB_ID.fullmatch(model) is None


def refuse_absent(model: Any) -> None:
    """Refuse a model, by name or path, that is neither here nor could be a Hub id."""
    if isinstance(model, str | Path) and is_local(str(model)) and not Path(model).exists():
        raise CompressionError(f"{model} is not a folder; {NAME_ONE}")


def refuse_no_file(path: Path | None) -> None:
    """Refuse a path at which nothing is."""
    if path is not None and not path.exists():
        raise CompressionError(f"{path} cannot be read: there is no such file; check the path")


@contextmanager
def wrap_full_disk(path: Path) -> Iterator[None]:
    """Turn a full disk, or a quota, into a sentence with the folder and the remedy."""
    try:
        yield
    except CompressionError:
        raise
    except Exception as error:  # safetensors has an exception of its own
        is_full = any(os.strerror(number) in str(error) for number in FULL)
        if not is_full and getattr(error, "errno", None) not in FULL:
            raise
        sentence = (
            f"the disk of {os.path.abspath(path)} is full; free some space and run the "
            "command again"
        )
        raise CompressionError(sentence) from error


@contextmanager
def replacing(path: Path, fresh: Path) -> Iterator[Path]:
    """Yield `fresh` to write to; the file there becomes `path` at the end, or is removed if
    anything fails."""
    with wrap_full_disk(path.parent):
        try:
            if fresh.is_symlink():
                fresh.unlink()  # someone's link would be written through
            yield fresh
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in a folder that exists, replacing what is there only once the new one is
    complete."""
    with wrap_full_disk(path.parent):
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with replacing(path, Path(fresh)), os.fdopen(handle, "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def write_file(out: Path, content: str, check: Callable[[], None]) -> None:
    """Write a file that becomes `out` once it is complete, by one run at a time.

    `check` refuses an `out` that is not to be written, also one that has appeared in the meantime.
    """
    with lock_output(out) as work, replacing(out, work / out.name) as fresh:
        fresh.write_text(content, encoding="utf-8", errors=LONE_HALVES)
        check()


def replace_folder(finished: Path, target: Path, old: Path) -> None:
    """Rename a finished folder into place; what it replaces then lies at `old`, and comes back if
    that fails.

    Of a folder that was made inside `target`, the content moves.
    """
    if target in finished.parents:
        try:
            _move_content(target, old)
            finished.replace(finished.with_name(ARRIVING))
            _move_content(finished.with_name(ARRIVING), target)
        except BaseException:
            _undo_move(finished.parent, target)
            raise
        return
    if target.exists():
        target.replace(old)
    try:
        finished.replace(target)
    except BaseException:
        if old.exists():
            old.replace(target)
        raise


def _work_name(folder: Path) -> str:
    return f".{Path(os.path.abspath(folder)).name}.moe-compressor"


def _content(folder: Path) -> list[Path]:
    """Return the content of a folder but its work folder, in the order in which it moves:
    config.json is the last."""
    content = [path for path in folder.iterdir() if path.name not in (_work_name(folder), LOST)]
    return sorted(
        content, key=lambda path: (path.name == "config.json", path.suffix == ".json", path.name)
    )


def _move_content(source: Path, target: Path) -> None:
    """Move what lies in a folder into another one; what leaves the folder of the output does so in
    reverse order."""
    target.mkdir(exist_ok=True)
    content = _content(source)
    for path in reversed(content) if source in target.parents else content:
        path.replace(target / path.name)
    if target in source.parents:
        source.rmdir()


def _undo_move(folder: Path, target: Path) -> None:
    """Bring back to the work folder inside `target` what had left it, and to `target` what a new
    output replaced."""
    if (folder / ARRIVING).exists():
        _move_content(target, folder / ARRIVING)
        (folder / ARRIVING).replace(folder / OUTPUT)
    if (folder / REPLACED).exists():
        _move_content(folder / REPLACED, target)


def is_free(out: Path) -> bool:
    """Return True if nothing is at `out`, or an empty folder. What a killed run left half moved is
    put back first."""
    folder = work_folder(out)
    if (folder / REPLACED).exists() or (folder / ARRIVING).exists():
        with suppress(CompressionError), lock_output(out):  # unless another run holds it
            pass
    if not os.path.lexists(out):
        return True
    return out.is_dir() and not out.is_symlink() and not _content(out)


def work_folder(out: Path) -> Path:
    """Return the hidden folder in which `out` is made: a sibling, but inside a folder that is empty
    or has to stay."""
    target = Path(os.path.abspath(out))  # `out` may be "." or ".."; a link is not followed
    beside = target.parent / _work_name(target)
    inside = target / _work_name(target)
    if target.is_symlink() or not target.is_dir():
        return beside
    is_begun = not beside.exists() and (inside.exists() or not _content(target))
    # nothing can be renamed to a mount point, nor in a folder that can't be written to
    table = Path("/proc/self/mountinfo")  # which has bind mounts, too
    points = [line.split()[4] for line in table.read_text().splitlines()] if table.exists() else []
    is_mounted = os.path.ismount(target) or os.path.realpath(target) in points
    stays = is_mounted or not os.access(target.parent, os.W_OK | os.X_OK)
    return inside if is_begun or stays else beside


def check_parent(out: Path, what: str = "output folder") -> None:
    """Refuse an output where nothing can be written."""
    parent = work_folder(out).parent
    if os.fsencode(out).decode(errors="ignore") != str(out):
        raise CompressionError(f"the name {out} has a byte that is no UTF-8; name another {what}")
    if not parent.is_dir():
        raise CompressionError(f"{parent} is not a folder; create it or name another {what}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CompressionError(
            f"{parent} cannot be written to; change its permissions or name another {what}"
        )


@contextmanager
def lock_output(out: Path) -> Iterator[Path]:
    """Yield the `work_folder` of `out`, locked by this run, which may lock it again within the
    block.

    What lies in it in the end is left to the next run with this output. An older output that a
    killed run had moved away comes back, and what one killed after the last rename left is cleared.
    Raises `CompressionError` while another run holds it, but not on a file system without locks.
    """
    folder = work_folder(out)
    holder = (folder, threading.get_ident())
    if holder in _held:
        yield folder
        return
    check_parent(out)
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    while not lock.is_locked:
        # what is written through a link would land elsewhere
        for path in [folder] if folder.is_symlink() else folder.rglob("*"):
            if path.is_symlink():
                raise CompressionError(
                    f"{path} is a link, and nothing is written through one; remove it and run again"
                )
        folder.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            # otherwise the run that held it has just ended, and removed it
            if (folder / LOCK).exists():
                raise CompressionError(
                    f"another run is writing {out}; wait for it or stop it"
                ) from error
        except FileNotFoundError:
            continue  # the folder, too
        except OSError as error:
            if isinstance(error, PermissionError) or not (folder / LOCK).exists():
                raise
            break  # a file system without locks
    _held.add(holder)
    try:
        # put back an output that a killed run was replacing, or clear what a finished one left
        target = Path(os.path.abspath(out))
        replaced = folder / REPLACED
        is_inside = folder.parent == target
        waiting = (folder / OUTPUT).exists() or (folder / ARRIVING).exists()
        is_whole = not waiting if is_inside else os.path.lexists(target)
        if replaced.exists() and is_whole:
            clear(folder)
        elif is_inside:
            _undo_move(folder, target)
        elif replaced.exists():
            replaced.replace(target)
        yield folder
    finally:
        _held.discard(holder)
        with suppress(OSError):
            if os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        lock.release()


def clear(folder: Path, keep: Collection[str] = (LOCK,)) -> None:
    """Remove everything in a folder but the names to `keep`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_folder(folder: Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Refuse a folder for reports that cannot be made, or exists and is not to be replaced by files
    of these names.

    `overwrite` replaces a folder with a report of the first name, and nothing but files of these
    names."""
    check_parent(folder, "folder for the reports")
    if is_free(folder):
        return
    if not overwrite:
        raise CompressionError(
            f"{folder} exists already; name a new folder for the reports or pass --overwrite"
        )
    first = folder / names[0]
    hint = "so --overwrite will not replace it; name a new folder for the reports"
    if first.suffix == ".json":
        content = json_object(first)
        is_report = any(name in content for name in REPORTED) or _is_of_tool(content)
    else:
        is_report = first.is_file() and first.read_bytes().startswith(PNG)
    if folder.is_symlink() or not is_report:
        raise CompressionError(f"{folder} holds no {names[0]}, {hint}")
    for path in _content(folder):
        if path.name not in names or not path.is_file():
            raise CompressionError(
                f"{folder} holds {path.name} beside {names[0]}, {hint} or move that"
            )


def _is_of_tool(content: Mapping[str, Any]) -> bool:
    """Return True if the JSON names a format of this tool."""
    return str(content.get("format", "")).startswith(f"{TOOL}-")


def whole_folder(
    folder: Path, names: Sequence[str], overwrite: bool = False
) -> AbstractContextManager[Path]:
    """Return a `new_folder` for reports of these names."""
    return new_folder(folder, partial(check_folder, folder, names, overwrite))


def write_files(
    folder: Path, contents: Mapping[str, Any], names: Sequence[str], overwrite: bool = False
) -> list[Path]:
    """Write reports, text or bytes, into a new folder, or nothing when anything fails; return their
    paths.

    With `overwrite` an earlier folder of reports of these `names` is replaced once the new one is
    complete."""
    with whole_folder(folder, names, overwrite) as fresh:
        for name, content in contents.items():
            data = content if isinstance(content, bytes) else content.encode("utf-8", LONE_HALVES)
            (fresh / name).write_bytes(data)
    return [folder / name for name in contents]


@contextmanager
def new_folder(out: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to fill, which becomes `out`, or nothing when anything fails; what was there stays
    until then.

    `check` refuses an `out` that is not to be written: at once, and again in the end, as filling
    may take a while."""
    check()
    target = Path(os.path.abspath(out))
    with wrap_full_disk(work_folder(out).parent), lock_output(out) as work:
        fresh = work / OUTPUT
        old = work / REPLACED
        try:
            for leftover in (fresh, old):  # of a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            fresh.mkdir()
            yield fresh
            check()
            replace_folder(fresh, target, old)
        finally:
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)


def default_folder() -> Path:
    """Return the folder of stored results: $MOE_COMPRESSOR_CACHE, or the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("MOE_COMPRESSOR_CACHE") or f"{caches}/{TOOL}/gate").expanduser()


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none that can be read."""
    try:
        content = read_json(path, "restore it")
    except (OSError, CompressionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_page(path: Path, made_by: str) -> bool:
    """Return True if a file ends with the name of its maker, as the pages of this tool do."""
    return path.is_file() and made_by.encode() in path.read_bytes()[-PAGE_END:]


def refuse_replacing(out: Path) -> None:
    """Refuse to replace anything but an empty folder, an output of this tool, or nothing but a
    checkpoint's files."""
    hint = "so --overwrite will not replace it"
    if out.is_symlink() or not out.is_dir():
        raise CompressionError(f"{out} is not a checkpoint folder, {hint}; name another folder")
    entries = _content(out)
    is_checkpoint = (out / "config.json").is_file() and any(
        WEIGHTS.fullmatch(path.name) for path in entries
    )
    if entries and not is_checkpoint and not _records(out):
        raise CompressionError(f"{out} is not a checkpoint folder, {hint}; name another folder")
    strays = _strays(out)
    if strays:
        more = f" and {len(strays) - MOST_NAMED} more" if len(strays) > MOST_NAMED else ""
        names = f"{', '.join(strays[:MOST_NAMED])}{more}"
        raise CompressionError(
            f"{out} holds {names}, no part of a checkpoint, {hint}; move what you need or name "
            "another folder"
        )


def _records(folder: Path) -> list[dict[str, Any]]:
    """Records of this tool in a folder."""
    records = [json_object(folder / name) for name in RECORDS]
    return [record for record in records if record.get("tool") == TOOL]


def _strays(folder: Path) -> list[str]:
    """Return the names of what was neither written by this tool nor is, by its name, part of a
    checkpoint."""
    records = _records(folder)
    strays = list[str]()
    known = {*RECORDS, SUMS}
    for record in records:
        known.update(record.get("files", ()))
    subfolders = {TEMPLATES, *entry_points.names(entry_points.EXPORTERS)}  # that compress makes
    for path in sorted(_content(folder)):
        name = path.name
        if path.is_symlink() or not path.is_dir():
            is_known = name in known or WEIGHTS.fullmatch(name) or BESIDE.fullmatch(name)
            if not is_known and not (records and _is_report(path)):
                strays.append(name)
        elif name in subfolders:
            strays += [f"{name}/{stray}" for stray in (_strays(path) if _records(path) else ())]
        elif name == ".cache" and os.listdir(path) == ["huggingface"]:
            continue  # of the Hub's client
        elif not records or not all(map(_is_report, path.iterdir())):
            strays.append(name)
    return strays


def _is_report(path: Path) -> bool:
    """Return True if `plan`, `report`, `gate`, `attribute` or `compare` writes such a file."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.suffix == ".html":
        return is_page(path, MADE_BY)
    return bool(REPORTS.fullmatch(path.name)) or (
        path.suffix == ".json" and _is_of_tool(json_object(path))
    )
