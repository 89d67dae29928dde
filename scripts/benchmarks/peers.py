"""Run other projects' pruning and ours on the same work, each in a process of its own, and compare.

    python -m scripts.benchmarks.peers --data train.jsonl --heldout valid.jsonl --model MODEL [--reap FOLDER] \\
        [--razor FOLDER] [--hope FOLDER] [--keep 0.5] [--samples 32] [--length 256]

The folders are checkouts of CerebrasResearch/reap, nick7nlp/Razor and awslabs/HOPE; REAP knows Mixtral, the others take
any model of stock experts. All read the same float32 checkpoint and token batches, keep as many experts, and compute in
float32 on one thread of the CPU. Seconds go from opening the checkpoint to the written output, without imports; memory
is the highest resident one. Both are theirs over ours. Losses are held out, in nats per token, with intervals of 95%.
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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.errors import CompressionError
from scripts.benchmarks import frame

# Imported by the checkouts for data sets, servers, pictures and training that are not asked for here.
NOT_NEEDED = {
    "accelerate", "datasets", "deepspeed", "dotenv", "evalplus", "h5py", "lm_eval", "matplotlib",
    "requests", "seaborn", "trl", "umap", "uvloop", "vllm", "wandb", "yaml",
}  # fmt: skip
METHODS = {
    "reap": ("reap, ours", "reap, theirs", "reap, theirs, weights as used"),
    "razor": ("razor, ours", "razor, theirs"),
    "hope": ("hope, ours", "hope, theirs"),
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


class MixtralBlockSparseTop2MLP(nn.Module):
    """One expert of Mixtral as transformers 4 had it: w2(act(w1 x) * w3 x)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor) -> Any:
        return self.w2(self.act_fn(self.w1(tokens)) * self.w3(tokens))


class MixtralSparseMoeBlock(nn.Module):
    """Routes each token to the experts of its largest router logits; REAP knows the block by this name."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_local_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        experts = [MixtralBlockSparseTop2MLP(config) for _ in range(self.num_experts)]
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, H] -> [B, L, H] and router logits [T, E]."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self.gate(tokens)
        weights, chosen = softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(hidden), logits


def load_old_mixtral(folder: str) -> Any:
    """Return a Mixtral with a module for every expert, as transformers 4 had it and REAP walks it."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.models.mixtral import modeling_mixtral
    from transformers.utils.output_capturing import OutputRecorder

    class MixtralDecoderLayer(modeling_mixtral.MixtralDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            del self.mlp
            self.block_sparse_moe = MixtralSparseMoeBlock(config)

        @property
        def mlp(self) -> Any:
            """Return what the stock forward calls: the block without its logits."""
            return lambda hidden: self.block_sparse_moe(hidden)[0]

    for kind in (MixtralBlockSparseTop2MLP, MixtralSparseMoeBlock, MixtralDecoderLayer):
        setattr(modeling_mixtral, kind.__name__, kind)
    recorder = OutputRecorder(MixtralSparseMoeBlock, index=1)
    modeling_mixtral.MixtralPreTrainedModel._can_record_outputs["router_logits"] = recorder
    register_checkpoint_conversion_mapping("mixtral", [], overwrite=True)
    model = modeling_mixtral.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def run_reap(job: dict[str, Any]) -> float:
    """Prune by REAP's `record_activations` and `prune`, pruning metrics only."""
    from reap import main as recording
    from reap import prune as pruning
    from reap.args import DatasetArgs, ModelArgs, ObserverArgs, PruneArgs, ReapArgs

    batches = [{"input_ids": batch} for batch in torch.load(job["tokens"])]
    recording.load_category_batches = lambda **_: {"all": batches}
    recording.parse_composite_dataset_spec = lambda *_, **__: None
    begin = time.perf_counter()
    model = load_old_mixtral(job["model"])
    # REAP weighs by the softmax over all experts, unless a config says this; Mixtral's doesn't, but its block does so.
    if job["method"].endswith("weights as used"):
        model.config.norm_topk_prob = True
    observer = ObserverArgs(record_pruning_metrics_only=True)
    arguments = (ReapArgs(profile=False), ModelArgs(), DatasetArgs(), observer)
    scratch = Path(job["out"]).with_name("out-observed")
    seen = recording.record_activations(model, None, *arguments, scratch)
    dropped = model.config.num_local_experts - job["keep"]
    pruning.prune(seen, model, PruneArgs(prune_method="reap"), dropped, Path(job["out"]))
    return begin


def run_razor(job: dict[str, Any]) -> float:
    """Prune by RAZOR's `collect`, `keep_indices` and `prune_block`."""
    from razor.adapters import get_adapter
    from razor.collect import collect
    from razor.metrics import keep_indices

    batches = [{"input_ids": batch} for batch in torch.load(job["tokens"])]
    begin = time.perf_counter()
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

    begin = time.perf_counter()
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
    """Prune by `compress`, without a correction."""
    from compressor import compress
    from compressor.memory import limit_caches

    limit_caches()
    strategy = job["method"].partition(",")[0]
    options = {"interaction": "norms"} if strategy == "hope" else {}
    begin = time.perf_counter()
    done = compress(
        job["model"], job["out"], experts=job["keep"], strategy=strategy, options=options, correct="none", split=1,
        dtype="float32", device="cpu", **job["reading"],
    )  # fmt: skip
    if (done.plan.calibration or {}).get("sha256") != job["sha256"]:
        raise CompressionError("calibrated with other tokens than the rest")
    return begin


def work(job: dict[str, Any]) -> None:
    """Do a job and print its seconds and the highest resident bytes of this process."""
    if job["peer"]:
        NOT_NEEDED.difference_update([name for name in NOT_NEEDED if importlib.util.find_spec(name)])
        sys.meta_path.append(Missing())
        sys.path.append(job["peer"] + ("/src" if job["method"].startswith("reap") else ""))
    theirs = {"reap": run_reap, "razor": run_razor, "hope": run_hope}
    begin = (theirs[job["method"].partition(",")[0]] if job["peer"] else run_ours)(job)
    print(json.dumps([time.perf_counter() - begin, frame.memory_of("self", "VmHWM")]))


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
    names = dict.fromkeys((*METHODS, "data", "heldout", "model", "job"))
    given = frame.options(__doc__, **names, keep=0.5, samples=32, length=256).parse_args()
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
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(base)
        sizes = {"samples": given.samples, "length": given.length, "vocab": config.vocab_size}
        batches = calibrate(parse_sources([given.data]), tokenizer, seed=0, **sizes)
        torch.save(list(batches.batches), tokens)
        keep = max(2, math.ceil(config.num_experts * given.keep))
        job = {
            "model": str(base),
            "tokens": str(tokens),
            "out": str(out),
            "keep": keep,
            "sha256": batches.identity["sha256"],
        }
        job["reading"] = {"calibration": given.data, "samples": given.samples, "sequence_length": given.length}
        environment = {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / "cache")}
        heldout = given.heldout, 32, given.length
        original = frame.losses(base, *heldout)
        print(frame.table(["method", "seconds", "memory", "loss over the base's", "same choice"]), flush=True)
        for project, methods in METHODS.items():
            checkout, ours = getattr(given, project), None
            for method in methods if checkout else ():
                peer = None if method.endswith("ours") else checkout
                words = json.dumps({**job, "method": method, "peer": peer})
                command = [sys.executable, "-m", "scripts.benchmarks.peers", "--job", words]
                child = frame.run_child(command, environment)
                seconds, memory = json.loads(child.output.splitlines()[-1])
                tokenizer.save_pretrained(out)
                apart = frame.losses(out, *heldout) - original
                error = 1.96 * float(apart.std()) / math.sqrt(len(apart))
                kept = kept_experts(base, out)
                ours = ours or (seconds, memory, kept)
                same = sum(kept[layer] == ours[2][layer] for layer in kept)
                cells = f"{apart.mean():.4f} ± {error:.4f}", f"{same} of {len(kept)} layers"
                print(frame.row(method, seconds / ours[0], memory / ours[1], *cells), flush=True)
                shutil.rmtree(out)


if __name__ == "__main__":
    frame.run(main)
