"""The tensors of multi-token-prediction heads in the output: their experts cut as their plan says, all else copied."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import build_meta
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model
from compressor.mtp.head import Head, find_heads, kept_heads
from compressor.recipe.plan import CompressionPlan, check_against
from compressor.surgery.configuration import expert_renames
from compressor.surgery.conversion import convert_unit, converted_outputs, through_model
from compressor.surgery.cutting import CutFiles
from compressor.surgery.tensors import OutputTensor, Piece, Portion, pieces, plan_outputs, stored_unit


def files_of_head(files: CutFiles, number: int) -> CutFiles:
    """Where the corrected tensors of the head of this number wait to be written."""
    return CutFiles(files.folder / f"head-{number}")


def check_plan(plan: CompressionPlan, model: OpenModel) -> tuple[Head, ...]:
    """Refuse a plan that was made for another model, or for one with another head; returns the heads that it keeps."""
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    check_against(plan, (*model.architecture.layers, *(head.named for head in heads)), model.fingerprint)
    return heads


@dataclass(frozen=True, slots=True)
class CutHead:
    """A head as it is written: what its model of one decoder layer gives under the head's names, and what is copied."""

    head: Head
    plan: CompressionPlan  # of the head alone, by the name in its own model
    cut: tuple[OutputTensor, ...]  # by that model's names
    copied: tuple[OutputTensor, ...]
    partial: PartialModel | None  # to go through, where stored tensors cannot be cut as they are
    files: CutFiles | None

    @property
    def unit(self) -> str:
        """The head's name as a decoder layer."""
        return self.head.names.unit

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """All tensors as they are written."""
        named = (replace(each, name=self.head.stored_name(each.name), unit=self.unit) for each in self.cut)
        return (*named, *self.copied)

    @property
    def renames(self) -> Mapping[str, str | None]:
        """For experts stored by themselves: what an expert's stored name becomes; None for a dropped one's."""
        model, name = self.head.model, self.head.stored_name
        found = expert_renames(model.architecture, model.layout, self.plan)
        return {name(old): None if new is None else name(new) for old, new in found.items()}

    def produce(self) -> Iterator[tuple[str, Iterator[Piece]]]:
        """Names and bytes of all its tensors."""
        model, unit = self.head.model, self.head.layer.unit
        if self.partial is None:
            made: Iterable[tuple[str, Iterator[Piece]]] = stored_unit(model.checkpoint, self.cut, unit)
        else:
            small = build_meta(model.architecture.with_experts(self.plan.experts), self.partial.dtype)
            made = convert_unit(self.partial, model.architecture, self.plan, small, self.files, unit)
        yield from ((self.head.stored_name(name), content) for name, content in made)
        yield from ((output.name, pieces(self.head.checkpoint, output)) for output in self.copied)


def cut_heads(model: OpenModel, plan: CompressionPlan, files: CutFiles | None, dtype: torch.dtype) -> list[CutHead]:
    """The heads that the plan keeps; those that go through a model do so in `dtype`, on the CPU."""
    found, taken = list[CutHead](), set[str]()
    for number, head in enumerate(kept_heads(model, [layer.module for layer in plan.layers])):
        own = next(layer for layer in plan.layers if layer.module == head.named.name)
        alone = replace(plan, layers=(replace(own, module=head.layer.name),), protected={})
        parts = [name for name in dict.fromkeys(head.names.parts.values()) if name not in taken]
        taken.update(parts)
        copied = tuple(_copied(model, name, head.names.unit) for name in parts)
        of, partial = head.model, None
        if through_model(of.layout, plan):
            partial = PartialModel(of.checkpoint, of.config, dtype, torch.device("cpu"))
            small = build_meta(of.architecture.with_experts(plan.experts), dtype)
            made = converted_outputs(partial, of.architecture, small)
        else:
            made = plan_outputs(of.checkpoint, of.layout, alone, of.architecture.units)
        cut = tuple(output for output in made if output.unit == head.layer.unit)
        kept = None if files is None else files_of_head(files, number)
        found.append(CutHead(head, alone, cut, copied, partial, kept))
    return found


def _copied(model: OpenModel, name: str, unit: str) -> OutputTensor:
    info = model.checkpoint.tensors[name]
    return OutputTensor(name, info.dtype, info.shape, unit, ((Portion(name, None, 1.0),),))


def verify_heads(folder: Path, experts: int, names: Iterable[str]) -> None:
    """Check that the written heads are found again and have that many experts; raises `CompressionError` if not."""
    written = find_heads(open_model(locate(str(folder))))
    stored = {name for head in written for name in head.names.stored}
    if missing := sorted(set(names) - stored):
        raise CompressionError(f"the written tensor {missing[0]!r} belongs to no multi-token-prediction head")
    for head in written:
        if head.layer.experts != experts:
            raise CompressionError(f"{head.named.name} was written with {head.layer.experts} experts, not {experts}")
