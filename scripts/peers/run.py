"""Run one method on one checkpoint in this process and write what it took: `python -m scripts.peers.run JOB TOLD`.

The other projects' code is imported from the checkout that the job names; here is only what their own scripts do
between loading and saving, with our token ids instead of their data sets, on the CPU. Seconds do not count imports.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from compressor.errors import CompressionError
from scripts.peers.absent import stand_in
from scripts.peers.job import Job, Told, read, write

NOT_NEEDED = (  # imported by the checkouts, for data sets, servers, pictures and training that are not asked for here
    "accelerate", "datasets", "deepspeed", "dotenv", "evalplus", "h5py", "lm_eval", "matplotlib", "requests", "seaborn",
    "trl", "umap", "uvloop", "vllm", "wandb", "yaml",
)  # fmt: skip
CATEGORY = "all"


class Phases:
    """Seconds by phase, in the order of the phases, and the processor's in all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        begin, spent = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self.cpu += time.process_time() - spent


def resident() -> int:
    """The highest resident bytes of this process so far; unlike rusage's, without those of the one that started it."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def size(folder: Path, suffix: str) -> int:
    """Bytes of the files of this suffix."""
    return sum(file.stat().st_size for file in folder.glob(f"*{suffix}"))


def kept_rows(before: torch.Tensor, after: torch.Tensor) -> list[list[int]]:
    """Which router rows are left, each a group of its own: [E, H], [K, H] -> K lists of one; refuses a changed row."""
    same = (before[None] == after[:, None]).all(dim=-1)  # [K, E]
    if (same.sum(dim=1) != 1).any():
        raise CompressionError(
            "a router row of the output is not exactly one of the checkpoint's; nothing was pruned"
        )
    return [[int(expert)] for expert in same.int().argmax(dim=1)]


def _gates(folder: Path) -> list[torch.Tensor]:
    """Router rows of every layer, [layer][E, H]."""
    from safetensors import safe_open

    found: dict[int, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118, a handle is no mapping
                if layer := re.search(r"\.(\d+)\.block_sparse_moe\.gate\.weight$", name):
                    found[int(layer[1])] = stream.get_tensor(name)
    return [found[layer] for layer in sorted(found)]


def pruned(job: Job) -> list[list[list[int]]]:
    """The experts that are left in every layer, by the output's router rows."""
    pairs = zip(_gates(Path(job.model)), _gates(Path(job.out)), strict=True)
    return [kept_rows(before, after) for before, after in pairs]


def prepare(checkout: str, below: str) -> None:
    """Make a checkout's package importable."""
    stand_in(NOT_NEEDED)
    sys.path.append(str(Path(checkout) / below))


def run_reap(job: Job, as_used: bool) -> Told:
    """REAP's `record_activations` and `prune`, pruning metrics only.

    Its observer weighs by the softmax over all experts, unless a config says `norm_topk_prob`, which Mixtral's does not
    say although its block does so; `as_used` says it.
    """
    from scripts.peers import old_mixtral

    prepare(job.peer or "", "src")
    old_mixtral.put_back()  # which it was written for
    from reap import main as recording  # type: ignore[import-not-found]
    from reap import prune as pruning
    from reap.args import DatasetArgs, ModelArgs, ObserverArgs, PruneArgs, ReapArgs  # type: ignore[import-not-found]

    batches, out, phases = torch.load(job.tokens), Path(job.out), Phases()
    recording.load_category_batches = lambda **_: {
        CATEGORY: [{"input_ids": batch} for batch in batches]
    }
    recording.parse_composite_dataset_spec = lambda *_, **__: None
    with phases.phase("open"):
        model = old_mixtral.load(Path(job.model))
    if as_used:
        model.config.norm_topk_prob = True
    arguments = (
        ReapArgs(profile=False),
        ModelArgs(),
        DatasetArgs(),
        ObserverArgs(record_pruning_metrics_only=True),
    )
    with phases.phase("calibrate"):
        seen = recording.record_activations(
            model, None, *arguments, out.with_name(f"{out.name}-observed")
        )
    with phases.phase("write"):
        pruning.prune(
            seen,
            model,
            PruneArgs(prune_method="reap"),
            model.config.num_local_experts - job.keep,
            out,
        )
    return Told(phases.seconds, phases.cpu, resident(), size(out, ".safetensors"), pruned(job))


def run_razor(job: Job) -> Told:
    """RAZOR's `collect`, `keep_indices` and `prune_block`, by the adapter for layouts that it has no own one for."""
    prepare(job.peer or "", "")
    from razor.adapters import get_adapter  # type: ignore[import-not-found]
    from razor.collect import collect  # type: ignore[import-not-found]
    from razor.metrics import keep_indices  # type: ignore[import-not-found]

    batches, phases = torch.load(job.tokens), Phases()
    with phases.phase("open"):
        model = load_stock(job)
        adapter = get_adapter(model.config, "generic")
    with phases.phase("calibrate"):
        seen = collect(model, adapter, [{"input_ids": batch} for batch in batches], verbose=False)
    with phases.phase("write"):
        blocks = adapter.moe_blocks(model)
        kept = [keep_indices(seen[block.tag], "razor", job.keep) for block in blocks]
        for block, experts in zip(blocks, kept, strict=True):
            adapter.prune_block(block.module, torch.tensor(experts))
        adapter.set_num_experts(job.keep)
        model.save_pretrained(job.out)
    return told_by_kept(job, phases, kept)


def run_hope(job: Job) -> Told:
    """HOPE's observer, matrix, quadratic program and `prune_moe_layer`; its scripts' HDF5 file stays in memory."""
    prepare(job.peer or "", "")
    from hope.calibrate import HOExpertObserver  # type: ignore[import-not-found]
    from hope.prune import prune_moe_layer  # type: ignore[import-not-found]
    from hope.solve import build_f_matrix, solve_qp  # type: ignore[import-not-found]

    batches, phases = torch.load(job.tokens), Phases()
    with phases.phase("open"):
        model = load_stock(job)
    with phases.phase("calibrate"), torch.no_grad():
        observer = HOExpertObserver(model)
        for batch in batches:
            model(input_ids=batch, use_cache=False)
        seen = {"all": {f"layer_{layer}": found for layer, found in observer.get_stats().items()}}
        observer.close()
    kept = list[list[int]]()
    with phases.phase("write"):
        blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        for layer, block in enumerate(blocks):
            matrix = build_f_matrix(seen, "all", layer)
            dropped = solve_qp(matrix, len(matrix) - job.keep)[0]
            kept.append([expert for expert, gone in enumerate(dropped) if not gone])
            prune_moe_layer(block, kept[-1])
        model.config.num_experts = job.keep  # Mixtral's config takes it for num_local_experts
        model.save_pretrained(job.out)
    return told_by_kept(job, phases, kept)


def load_stock(job: Job) -> Any:
    """The checkpoint in float32, as the installed transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)


def told_by_kept(job: Job, phases: Phases, kept: list[list[int]]) -> Told:
    """What a run tells that kept these experts of every layer."""
    groups = [[[expert] for expert in experts] for experts in kept]
    return Told(phases.seconds, phases.cpu, resident(), size(Path(job.out), ".safetensors"), groups)


def run_ours(job: Job, strategy: str, **options: Any) -> Told:
    """`compress` with this strategy, without a correction."""
    from compressor.memory import limit_caches

    limit_caches()
    import_classes(job)
    from compressor.api import compress

    phases = Phases()
    with phases.phase("all"):
        done = compress(
            job.model, job.out, experts=job.keep, strategy=strategy, options=options, correct="none", split=1,
            dtype="float32", device="cpu", calibration=job.text, samples=job.samples, sequence_length=job.length,
        )  # fmt: skip
    layers = sorted(done.plan.expert_plan.layers, key=lambda layer: layer.layer)
    groups = [[sorted(group.members) for group in layer.groups] for layer in layers]
    digest = str((done.plan.calibration or {}).get("sha256"))
    return Told(
        phases.seconds, phases.cpu, resident(), size(Path(job.out), ".safetensors"), groups, digest
    )


def import_classes(job: Job) -> None:
    """The model's classes, whose import counts for nobody."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model))


def run_nothing(job: Job) -> Told:
    """Imports alone: what the others' memory is compared with."""
    import_classes(job)
    return Told({}, 0.0, resident(), 0)


METHODS: dict[str, Callable[[Job], Told]] = {
    "nothing": run_nothing,
    "reap, ours": lambda job: run_ours(job, "reap"),
    "reap, theirs": lambda job: run_reap(job, as_used=False),
    "reap, theirs, weights as used": lambda job: run_reap(job, as_used=True),
    "razor, ours": lambda job: run_ours(job, "razor"),
    "razor, theirs": run_razor,
    "hope, ours": lambda job: run_ours(job, "hope", interaction="norms"),
    "hope, theirs": run_hope,
}


def main() -> None:
    """Do the job of a file and write what was found into another."""
    job = read(Path(sys.argv[1]), Job)
    write(Path(sys.argv[2]), METHODS[job.method](job))


if __name__ == "__main__":
    main()
