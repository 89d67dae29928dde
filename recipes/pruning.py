"""Diversifying the Expert Knowledge for Task-Agnostic Pruning in Sparse MoE (Zhang et al. 2024, arXiv:2407.09590).

    python recipes/pruning.py table1                  # the demo model, offline, on a CPU, in minutes
    python recipes/pruning.py table1 --paper          # the paper's model, text and tasks: the Hub, a GPU of 80 GB, a day
    python recipes/pruning.py table1 org/model --experts 96,64 --text texts.jsonl --tasks boolq,rte --limit 0

Tables, figure4 and figure5 write a comparison by strategy, experts and task into OUT. figures2 (and A1, A2) is a page
OUT.html with maps of the experts; figure6 has routed tokens before and after; figureA3 tries sets of experts that stay
(at most --most a layer, each a pass over all items) and compresses to the best ones.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from running import DEMO, moe_compress, parser

COUNT = "count-guided"
VECTORIZED = "model-centric:representation=vectorized"
SURROGATE = "model-centric:representation=surrogate"
UNIFORM = "data-centric:similarity=mean-output"
LEARN = f"{UNIFORM}:merge=learned"
MIXTRAL, LARGE = "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"
FIRST = f"router-guided,{COUNT},enumerate"
DEEP = "62,60,58,56,54,52,50,48"
# Name: the paper's model, its numbers of experts, and the strategies that are compared.
RECIPES = {
    "table1": (MIXTRAL, "6,4", f"{FIRST},{VECTORIZED},{LEARN}"),
    "table2": (LARGE, "6,4", f"{FIRST},{SURROGATE},{LEARN}"),
    "table3": (MIXTRAL, "6", f"{UNIFORM}:mix_tokens=false"),
    "table4": (MIXTRAL, "6,4", f"{UNIFORM},{UNIFORM}:merge_routers=false"),
    "tableA1": (MIXTRAL, "6,4", f"{VECTORIZED},{SURROGATE},{LEARN},{UNIFORM}:merge=max"),
    "figures2": (MIXTRAL, "6", ""),
    # Stock transformers has no class of DeepSeek-MoE-16B; V2-Lite, too, has 64 experts, 2 shared and 6 chosen.
    "figure4": ("deepseek-ai/DeepSeek-V2-Lite", DEEP, f"{COUNT},{SURROGATE},{UNIFORM}"),
    "figure5": ("Qwen/Qwen2-57B-A14B", DEEP, f"{COUNT},{SURROGATE},{UNIFORM}"),
    "figure6": (MIXTRAL, "6", ""),
    "figureA3": (MIXTRAL, "6", ""),
}
SEARCH = Path(__file__).parents[1] / "examples" / "search_by_tasks.py"
TOKENS = 32  # of each sample, on which table3 compares experts: 8 GB for the paper's 2,048 samples


def main() -> None:
    """Run one table or figure."""
    sizes: dict[str, Any] = {"samples": 128, "most": 28, "sizes": "128,256,512,2048"}
    settings = dict.fromkeys(("experts", "text", "length", "tasks", "limit"))
    given = parser(__doc__, RECIPES, paper=False, **settings, **sizes).parse_args()
    paper_model, paper_experts, strategies = RECIPES[given.name]
    if given.paper:
        model = given.model if given.model != str(DEMO) else paper_model
        defaults = (paper_experts, "allenai/c4", "2048", "mmlu,boolq,openbookqa,rte", "0")
    else:
        model, defaults = given.model, ("12,8", "demo", "128", "moe_demo", "20")
    experts, text, length, tasks, limit = (
        getattr(given, name) or default for name, default in zip(settings, defaults, strict=True)
    )
    first, out = experts.split(",")[0], given.out or Path(given.name)
    limits = ["--limit", limit] if limit != "0" else []

    def reading(samples: object) -> list[object]:
        return ["--calibration", text, "--samples", samples, "--sequence-length", length]

    def compare(folder: Path, samples: int, *more: object) -> None:
        moe_compress(
            "compare", model, "--strategies", strategies, "--experts", experts, "--correct", "none",
            "--random-seeds", 1, "--evaluation-samples", 16, *reading(samples),
            "--tasks", tasks, *limits, "-o", folder, *more,
        )  # fmt: skip

    if given.name == "table3":
        out.mkdir(parents=True, exist_ok=True)
        for samples in map(int, given.sizes.split(",")):
            compare(out / str(samples), samples, "--sample-tokens", samples * TOKENS)
    elif given.name == "figures2":
        page = ("-o", f"{out}.html", "--figures", out)
        moe_compress("report", model, "--experts", first, *reading(given.samples), *page)
    elif given.name == "figure6":
        out.mkdir(parents=True, exist_ok=True)
        for strategy in (COUNT, "data-centric"):
            words = ("--experts", first, "--strategy", strategy, "--correct", "none")
            moe_compress("compress", model, "-o", out / strategy, *words, *reading(given.samples))
            page = ("-o", out / f"{strategy}.html", "--figures", out / f"{strategy}-figures")
            moe_compress("report", out / strategy, *page)
    elif given.name == "figureA3":
        search = [sys.executable, SEARCH, model, "--experts", first, "--tasks", tasks, *limits]
        search += ["--alone", "--most", str(given.most), "-o", f"{out}.json"]
        subprocess.run(search, check=True)
        words = ("--experts", first, "--strategy", "aimer", "--protect", f"{out}.json")
        moe_compress("compress", model, "-o", out, *words, "--correct", "none")
    else:
        compare(out, given.samples)


if __name__ == "__main__":
    main()
