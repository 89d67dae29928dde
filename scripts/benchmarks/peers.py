"""Run other projects' pruning and ours on the same work, each in a process of its own, and compare.

    python -m scripts.benchmarks.peers --model MODEL --data train.jsonl --heldout valid.jsonl [--keep 0.5] \\
        [--samples 32] [--length 256] [--reap FOLDER] [--llm-compressor PYTHON] [--modelopt PYTHON] \\
        [--razor FOLDER] [--hope FOLDER]

The folders are checkouts of CerebrasResearch/reap, nick7nlp/Razor and awslabs/HOPE; REAP's has a .venv with torch and
transformers 4.55.0. PYTHON is that of an environment with llmcompressor or nvidia-modelopt and torch. All read the same
float32 checkpoint and token batches, keep as many experts, and compute in float32 on one thread of the CPU. Seconds are
those of the processor from opening the checkpoint to the written output, without imports; memory is the highest
resident one. Both are over those of the first row. Losses are held out, in nats per token, with intervals of 95%. The
last column counts the layers in which a peer keeps the same experts as the nearest row of ours above it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from compressor.errors import CompressionError
from scripts.benchmarks import frame

# Imported by the checkouts for data sets, servers, pictures and training that are not asked for here.
NOT_NEEDED = {
    "accelerate", "datasets", "deepspeed", "dotenv", "evalplus", "h5py", "lm_eval", "matplotlib",
    "requests", "scipy", "seaborn", "sklearn", "trl", "umap", "uvloop", "vllm", "wandb", "yaml",
}  # fmt: skip
ALONE = {"strategy": "reap", "correct": "none", "split": 1, "evaluate": False}
# Rows in their order: the option that asks for one, and how it's run. Peers are compared with the row of ours before.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours, reap": ("model", ALONE),
    "REAP": ("reap", {"gates": "softmax"}),
    "REAP, the model's gates": ("reap", {"gates": "model"}),
    "llm-compressor, propagate_error=False": ("llm_compressor", {"propagate_error": False}),
    "Model-Optimizer": ("modelopt", {}),
    "ours, reap, sequential": ("model", {**ALONE, "sequential": True}),
    "llm-compressor": ("llm_compressor", {}),
    "ours, razor": ("razor", {**ALONE, "strategy": "razor"}),
    "RAZOR": ("razor", {}),
    "ours, hope": ("hope", {**ALONE, "strategy": "hope", "options": {"interaction": "norms"}}),
    "HOPE": ("hope", {}),
    "ours, default": ("model", {}),
}


class Anything(ModuleType):
    """A module, or whatever is imported from one: may be called and asked for anything, and does nothing."""

    def __init__(self, name: Any = "", *_: Any, **__: Any) -> None:
        super().__init__(str(name))

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets packages that aren't installed be imported empty."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def run_reap(job: dict[str, Any]) -> float:
    """Prune by REAP's `record_activations` and `prune`, pruning metrics only."""
    from reap import main as recording
    from reap import prune as pruning
    from reap import pruning_metrics
    from reap.args import DatasetArgs, ModelArgs, ObserverArgs, PruneArgs, ReapArgs
    from reap.models.glm.modeling_glm4_moe import Glm4MoeForCausalLM

    batches = [{"input_ids": batch} for batch in torch.load(job["tokens"])]
    recording.load_category_batches = lambda **_: {"all": batches}
    recording.parse_composite_dataset_spec = lambda *_, **__: None
    begin = time.process_time()
    glm = AutoConfig.from_pretrained(job["model"]).model_type == "glm4_moe"
    model_class = Glm4MoeForCausalLM if glm else AutoModelForCausalLM
    model = model_class.from_pretrained(job["model"], torch_dtype=torch.float32)
    if job["settings"]["gates"] == "model":
        # REAP takes the softmax over all experts, renormalised where norm_topk_prob says so. Mixtral normalises without
        # saying so, and GLM's gates are sigmoids.
        model.config.norm_topk_prob = getattr(model.config, "norm_topk_prob", True)
        if glm:
            pruning_metrics.F = SimpleNamespace(softmax=lambda logits, **_: logits.sigmoid())
    # What an earlier row observed lies in the same folder.
    observer = ObserverArgs(record_pruning_metrics_only=True, overwrite_observations=True)
    arguments = (ReapArgs(profile=False), ModelArgs(), DatasetArgs(), observer)
    seen = recording.record_activations(model.eval(), None, *arguments, Path(job["out"]).with_name("out-observed"))
    pruning.prune(seen, model, PruneArgs(prune_method="reap"), job["experts"] - job["keep"], Path(job["out"]))
    return begin


def run_llm_compressor(job: dict[str, Any]) -> float:
    """Prune by llm-compressor's `REAPPruningModifier`, routed experts alone computed."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import repack_moe
    from llmcompressor.modifiers.pruning.reap import REAPPruningModifier

    tokens = torch.cat(torch.load(job["tokens"]))
    begin = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    # Half an expert more, since the share is rounded down.
    sparsity = (job["experts"] - job["keep"] + 0.5) / job["experts"]
    oneshot(
        model=model, tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        dataset=Dataset.from_dict({"input_ids": tokens.tolist()}), recipe=REAPPruningModifier(sparsity=sparsity),
        num_calibration_samples=len(tokens), max_seq_length=tokens.shape[1], shuffle_calibration_samples=False,
        moe_calibrate_all_experts=False, **job["settings"],
    )  # fmt: skip
    # Mixtral's experts would otherwise be saved under names that transformers doesn't know, and GLM's config with the
    # former number of experts.
    repack_moe(model)
    model.save_pretrained(job["out"])
    model.config.save_pretrained(job["out"])
    return begin


def run_modelopt(job: dict[str, Any]) -> float:
    """Prune by the one mode of Model-Optimizer that drops experts."""
    import modelopt.torch.prune as mtp

    batches = torch.load(job["tokens"])
    begin = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)

    def calibrate(model: Any) -> None:
        for batch in batches:
            model(batch)

    constraints = {"export_config": {"num_moe_experts": job["keep"]}}
    mtp.prune(model, "mcore_minitron", constraints, batches[0], {"forward_loop": calibrate})
    model.save_pretrained(job["out"])
    return begin


def run_razor(job: dict[str, Any]) -> float:
    """Prune by RAZOR's `collect`, `keep_indices` and `prune_block`."""
    from razor.adapters import get_adapter
    from razor.collect import collect
    from razor.metrics import keep_indices

    batches = [{"input_ids": batch} for batch in torch.load(job["tokens"])]
    begin = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    adapter = get_adapter(model.config, "generic")
    seen = collect(model, adapter, batches, verbose=False)
    for block in adapter.moe_blocks(model):
        kept = keep_indices(seen[block.tag], "razor", job["keep"])
        adapter.prune_block(block.module, torch.tensor(kept))
    adapter.set_num_experts(job["keep"])
    model.save_pretrained(job["out"])
    return begin


def run_hope(job: dict[str, Any]) -> float:
    """Prune by HOPE's observer, matrix, quadratic program and `prune_moe_layer`."""
    from hope.calibrate import HOExpertObserver
    from hope.prune import prune_moe_layer
    from hope.solve import build_f_matrix, solve_qp

    begin = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    observer = HOExpertObserver(model)
    with torch.no_grad():
        for batch in torch.load(job["tokens"]):
            model(input_ids=batch, use_cache=False)
    seen = {"all": {f"layer_{layer}": found for layer, found in observer.get_stats().items()}}
    observer.close()
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for layer, block in enumerate(blocks):
        matrix = build_f_matrix(seen, "all", layer)
        dropped = solve_qp(matrix, len(matrix) - job["keep"])[0]
        prune_moe_layer(block, [expert for expert, gone in enumerate(dropped) if not gone])
    model.config.num_experts = job["keep"]  # Mixtral's config takes it for num_local_experts
    model.save_pretrained(job["out"])
    return begin


def run_ours(job: dict[str, Any]) -> float:
    """Prune by `compress`."""
    from compressor import compress
    from compressor.memory import limit_caches

    limit_caches()
    begin = time.process_time()
    done = compress(
        job["model"], job["out"], experts=job["keep"], dtype="float32", device="cpu", **job["reading"], **job["settings"],
    )  # fmt: skip
    if (done.plan.calibration or {}).get("sha256") != job["sha256"]:
        raise CompressionError("calibrated with other tokens than the rest")
    return begin


RUNS = {
    "ours": run_ours, "reap": run_reap, "llm_compressor": run_llm_compressor, "modelopt": run_modelopt,
    "razor": run_razor, "hope": run_hope,
}  # fmt: skip


def work(job: dict[str, Any]) -> None:
    """Do a job and print its seconds and the highest resident bytes of this process."""
    if job["checkout"]:
        NOT_NEEDED.difference_update([name for name in NOT_NEEDED if importlib.util.find_spec(name)])
        sys.meta_path.append(Missing())
        sys.path.append(job["checkout"])
    begin = RUNS[job["run"]](job)
    print(json.dumps([time.process_time() - begin, frame.memory_of("self", "VmHWM")]))


def kept_experts(base: Path, out: Path) -> dict[int, list[int]]:
    """Return which router rows are left in each layer; refuses a changed row."""
    from tests.support import small

    rows: dict[Path, dict[int, Tensor]] = {base: {}, out: {}}
    for folder, routers in rows.items():
        for name, tensor in small.tensors_of(folder).items():
            layer = re.search(r"\.(\d+)\.\w+\.gate\.weight$", name)
            if layer:
                routers[int(layer[1])] = tensor
    kept = {}
    for number, before in rows[base].items():
        same = (before[None] == rows[out][number][:, None]).all(dim=-1)  # [K, E]
        if (same.sum(dim=1) != 1).any():
            raise CompressionError(f"a router row of {out} is not exactly one of the checkpoint's")
        kept[number] = sorted(same.int().argmax(dim=1).tolist())
    return kept


def main() -> None:
    """Carry out the runs and print a row for each."""
    peers = dict.fromkeys(("reap", "llm_compressor", "modelopt", "razor", "hope"))
    names = dict.fromkeys(("data", "heldout", "model", "job"))
    given = frame.options(__doc__, **names, **peers, keep=0.5, samples=32, length=256).parse_args()
    if given.job:
        work(json.loads(given.job))
        return
    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        scratch, source = Path(temporary), Path(given.model)
        base, out, tokens = scratch / "model", scratch / "out", scratch / "tokens.pt"
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(base)
        config = AutoConfig.from_pretrained(base)
        # transformers 4 looks for rope_theta and partial_rotary_factor beside rope_parameters.
        stored = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(stored["rope_parameters"] | stored))
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(base)
        sizes = {"samples": given.samples, "length": given.length, "vocab": config.vocab_size}
        batches = calibrate(parse_sources([given.data]), tokenizer, seed=0, **sizes)
        torch.save(list(batches.batches), tokens)
        experts = config.num_local_experts
        job = {
            "model": str(base),
            "tokens": str(tokens),
            "out": str(out),
            "experts": experts,
            "keep": max(2, math.ceil(experts * given.keep)),
            "sha256": batches.identity["sha256"],
            "reading": {"calibration": given.data, "samples": given.samples, "sequence_length": given.length},
        }
        environment = {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / "cache")}
        heldout = given.heldout, 32, given.length
        original = frame.losses(base, *heldout)

        print(frame.table(["method", "seconds", "memory", "loss over the base's", "same experts"]), flush=True)
        first: list[float] = []
        ours: dict[int, list[int]] = {}
        for method, (option, settings) in ROWS.items():
            place = getattr(given, option)
            if not place:
                continue
            run, python, checkout = option, sys.executable, ""
            if method.startswith("ours"):
                run = "ours"
            elif option == "reap":
                python, checkout = f"{place}/.venv/bin/python", f"{place}/src"
            elif option in ("razor", "hope"):
                checkout = place
            else:
                python = place
            words = json.dumps({**job, "settings": settings, "run": run, "checkout": checkout})
            shutil.rmtree(out, ignore_errors=True)
            try:
                child = frame.run_child([python, "-m", "scripts.benchmarks.peers", "--job", words], environment)
                tokenizer.save_pretrained(out)
                apart = frame.losses(out, *heldout) - original
                # The default trains routers, too, so that their rows don't say which expert is which.
                kept = {} if method == "ours, default" else kept_experts(base, out)
            except CompressionError as error:
                if run == "ours":
                    raise
                print(frame.row(method, "", "", str(error).splitlines()[-1], ""), flush=True)
                continue
            if run == "ours":
                ours = kept
            taken = json.loads(child.output.splitlines()[-1])
            first = first or taken
            interval = 1.96 * float(apart.std()) / math.sqrt(len(apart))
            same = sum(kept[layer] == ours[layer] for layer in kept)
            cells = f"{apart.mean():.4f} ± {interval:.4f}", f"{same} of {len(kept)} layers" if kept else ""
            print(frame.row(method, taken[0] / first[0], taken[1] / first[1], *cells), flush=True)


if __name__ == "__main__":
    frame.run(main)
