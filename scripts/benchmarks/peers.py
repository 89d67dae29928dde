"""Run other projects' pruning and ours on the same work, each in a process of its own, and compare.

    python -m scripts.benchmarks.peers --data train.jsonl --heldout valid.jsonl --model MODEL [--reap FOLDER] \\
        [--razor FOLDER] [--hope FOLDER] [--keep 0.5] [--samples 32] [--length 256]

The folders are checkouts of CerebrasResearch/reap, nick7nlp/Razor and awslabs/HOPE; here is only what their own scripts
do between loading and saving, and what their imports need of today's transformers. REAP knows Mixtral, RAZOR and HOPE
take any model of stock experts. Everybody reads the same float32 checkpoint, calibrates with the same token batches,
keeps as many experts, computes in float32 on the CPU with as many threads, and writes a checkpoint. Seconds go from
opening the checkpoint to the written output, without imports; memory is the highest resident one of the process. Both
are theirs over ours of the same method. Losses are held out, in nats per token, with intervals of 95%.
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
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import one_hot, softmax
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


class Anything:
    """May be called and asked for anything, and does nothing: for names that are imported and not used."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets packages that aren't installed be imported empty."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in NOT_NEEDED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return EmptyModule(spec.name)

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
        routed = one_hot(chosen, self.num_experts).permute(2, 0, 1)
        for expert, mask in zip(self.experts, routed, strict=True):
            token, place = mask.nonzero(as_tuple=True)
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
    """Prune by REAP's `record_activations` and `prune`, pruning metrics only.

    Its observer weighs by the softmax over all experts, unless a config says `norm_topk_prob`, which Mixtral's does not
    say although its block does so; "weights as used" says it.
    """
    from reap import main as recording  # type: ignore[import-not-found]
    from reap import prune as pruning
    from reap.args import DatasetArgs, ModelArgs, ObserverArgs, PruneArgs, ReapArgs  # type: ignore[import-not-found]

    batches = [{"input_ids": batch} for batch in torch.load(job["tokens"])]
    recording.load_category_batches = lambda **_: {"all": batches}
    recording.parse_composite_dataset_spec = lambda *_, **__: None
    begin = time.perf_counter()
    model = load_old_mixtral(job["model"])
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
    from razor.adapters import get_adapter  # type: ignore[import-not-found]
    from razor.collect import collect  # type: ignore[import-not-found]
    from razor.metrics import keep_indices  # type: ignore[import-not-found]

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
    from hope.calibrate import HOExpertObserver  # type: ignore[import-not-found]
    from hope.prune import prune_moe_layer  # type: ignore[import-not-found]
    from hope.solve import build_f_matrix, solve_qp  # type: ignore[import-not-found]

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
    reading = {name: job[name] for name in ("calibration", "samples", "sequence_length")}
    begin = time.perf_counter()
    done = compress(
        job["model"], job["out"], experts=job["keep"], strategy=strategy, options=options,
        correct="none", split=1, dtype="float32", device="cpu", **reading,
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


def routers(folder: Path) -> dict[int, Tensor]:
    """Return the router rows of every layer, [E, H]."""
    found: dict[int, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118, a handle is no mapping
                if layer := re.search(r"\.(\d+)\.\w+\.gate\.weight$", name):
                    found[int(layer[1])] = stream.get_tensor(name)
    return found


def kept_experts(base: Path, out: Path) -> dict[int, list[int]]:
    """Return which router rows are left in each layer; refuses a changed row."""
    before, after, kept = routers(base), routers(out), {}
    for layer, rows in before.items():
        same = (rows[None] == after[layer][:, None]).all(dim=-1)  # [K, E]
        if (same.sum(dim=1) != 1).any():
            raise CompressionError(f"a router row of {out} is not exactly one of the checkpoint's")
        kept[layer] = sorted(same.int().argmax(dim=1).tolist())
    return kept


def main() -> None:
    """Carry out the runs and print a row for each."""
    sizes = {"keep": 0.5, "samples": 32, "length": 256, "heldout_samples": 32, "threads": 1}
    names = dict.fromkeys((*METHODS, "data", "heldout", "model", "job"))
    given = frame.options(__doc__, **names, **sizes).parse_args()
    if given.job:
        work(json.loads(Path(given.job).read_text()))
        return
    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        scratch, source = Path(temporary), Path(given.model)
        base, out, job_file = scratch / "model", scratch / "out", scratch / "job.json"
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(base)
        config = AutoConfig.from_pretrained(base)
        reading = {"samples": given.samples, "length": given.length, "vocab": config.vocab_size}
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(base)
        batches = calibrate(parse_sources([given.data]), tokenizer, seed=0, **reading)
        torch.save(list(batches.batches), scratch / "tokens.pt")
        job = {
            "model": str(base), "tokens": str(scratch / "tokens.pt"), "out": str(out), "calibration": given.data,
            "samples": given.samples, "sequence_length": given.length, "sha256": batches.identity["sha256"],
            "keep": max(2, math.ceil(config.num_experts * given.keep)),
        }  # fmt: skip
        environment = {"OMP_NUM_THREADS": str(given.threads)}
        environment["MOE_COMPRESSOR_CACHE"] = str(scratch / "cache")
        heldout = given.heldout, given.heldout_samples, given.length
        original = frame.losses(base, *heldout)
        table = frame.Rows("method", "seconds", "memory", "loss over the base's", "same choice")
        for project, methods in METHODS.items():
            checkout, ours = getattr(given, project), None
            for method in methods if checkout else ():
                peer = None if method.endswith("ours") else checkout
                job_file.write_text(json.dumps({**job, "method": method, "peer": peer}))
                command = [sys.executable, "-m", "scripts.benchmarks.peers", "--job", str(job_file)]
                child = frame.run_child(command, environment)
                seconds, memory = json.loads(child.output.splitlines()[-1])
                tokenizer.save_pretrained(out)
                loss = frame.with_error(frame.losses(out, *heldout) - original)
                kept = kept_experts(base, out)
                ours = ours or (seconds, memory, kept)
                same = sum(kept[layer] == ours[2][layer] for layer in kept)
                agreement = f"{same} of {len(kept)} layers"
                table.add(method, seconds / ours[0], memory / ours[1], loss, agreement)
                shutil.rmtree(out)


if __name__ == "__main__":
    frame.run(main)
