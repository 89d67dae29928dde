"""Router tensors on disk, kept by an interrupted run."""

from pathlib import Path

from compressor.steps.routers.bake_routers import RoutersBaked
from compressor.surgery.kept import keep_tensors, kept_tensors, told_of


def keep(path: Path, baked: RoutersBaked) -> None:
    """Write baked routers whole, or not at all."""
    keep_tensors(path, baked.tensors, dict(baked.result))


def kept(path: Path) -> RoutersBaked | None:
    """What `keep` has written; None if there is nothing, or nothing that can be read."""
    result = told_of(path)
    return None if result is None else RoutersBaked(kept_tensors(path), result)
