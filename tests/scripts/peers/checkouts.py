"""Checkouts of peers that keep to the interfaces of theirs, with arithmetic of our own; test support."""

from pathlib import Path

ARGS = """
import dotenv
from vllm.entrypoints.openai.api_server import run_server

dotenv.load_dotenv()

class Given:
    def __init__(self, **given):
        self.__dict__.update(given)

ReapArgs = ModelArgs = DatasetArgs = ObserverArgs = PruneArgs = Given
"""
MAIN = """
import torch
from vllm import TokensPrompt

def load_category_batches(**_):
    raise RuntimeError("data sets are not to be loaded")

parse_composite_dataset_spec = load_category_batches

@torch.no_grad()
def record_activations(model, tokenizer, reap, given, data, observer, folder):
    assert parse_composite_dataset_spec("any", default_split="train") is None and observer.record_pruning_metrics_only
    seen = {}
    def watch(number):
        def see(block, arguments, output):
            tokens, logits = arguments[0].flatten(0, 1), output[1]
            weights, chosen = logits.softmax(-1), logits.topk(block.top_k).indices
            if getattr(model.config, "norm_topk_prob", False):
                weights = weights / weights.gather(1, chosen).sum(1, keepdim=True)
            sums, counts = seen.setdefault(number, (torch.zeros(block.num_experts), torch.zeros(block.num_experts)))
            for place, expert in enumerate(block.experts):
                mine = (chosen == place).any(1)
                sums[place] += (weights[mine, place] * expert(tokens[mine]).norm(dim=1)).sum()
                counts[place] += mine.sum()
        return see
    for number, layer in enumerate(model.model.layers):
        layer.block_sparse_moe.register_forward_hook(watch(number))
    for batch in load_category_batches(dataset_name="any")["all"]:
        model(**batch)
    return {number: sums / counts.clamp(min=1) for number, (sums, counts) in seen.items()}
"""
PRUNE = """
import torch

def prune(seen, model, arguments, count, folder):
    assert arguments.prune_method == "reap"
    for number, saliency in seen.items():
        block = model.model.layers[number].block_sparse_moe
        kept = sorted(saliency.topk(len(saliency) - count).indices.tolist())
        block.experts = torch.nn.ModuleList(block.experts[place] for place in kept)
        block.gate.weight.data = block.gate.weight.data[kept]
    model.config.num_local_experts = len(kept)
    model.save_pretrained(folder)
"""
GROUPING = """
import seaborn, torch
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralBlockSparseTop2MLP

class ExpertsGrouperForMixtral:
    def __init__(self, config, similarity_base, cluster, linkage):
        assert (similarity_base, cluster, linkage) == ("expert-output", "hierarchical", "average")

    def compute_all_usages(self, model, loader):
        for batch in loader:
            with torch.no_grad():
                told = model(input_ids=batch["input_ids"].cuda(), output_router_logits=True).router_logits
            assert [logits.shape for logits in told] == [(batch["input_ids"].numel(), 8)] * len(model.model.layers)

    def cluster_experts(self, model, dataloader, num_groups):
        self.labels = {number: torch.arange(8) % num_groups for number in range(len(model.model.layers))}

    def group_state_dict(self):
        return self.labels

def merge_by_groups_with_usage_weighted(model, grouper, merging_layers):
    for number in merging_layers:
        experts = model.model.layers[number].block_sparse_moe.experts
        for place, label in enumerate(grouper.labels[number].tolist()):
            assert isinstance(experts[place], MixtralBlockSparseTop2MLP)
            experts[place] = experts[label]
    return model
"""


def reap(folder: Path) -> Path:
    """A package `reap` that prunes by the mean of gate times output norm over an expert's tokens."""
    package = folder / "src" / "reap"
    package.mkdir(parents=True)
    for name, source in {"__init__": "", "args": ARGS, "main": MAIN, "prune": PRUNE}.items():
        (package / f"{name}.py").write_text(source)
    return folder


def hc_smoe(folder: Path) -> Path:
    """A package `hcsmoe` that puts expert i in group i modulo the number of groups and keeps each group's first."""
    package = folder / "hcsmoe" / "merging"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "grouping_mixtral.py").write_text(GROUPING)
    return folder
