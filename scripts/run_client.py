"""Run one real client on one checkpoint; `scripts.check_clients` calls it with the Python that has the client.

    python scripts/run_client.py version llama|vllm|converter [CHECKOUT]
    python scripts/run_client.py convert CHECKOUT FOLDER OUT.gguf
    python scripts/run_client.py tensors CHECKOUT FILE.gguf EXPECTED.npz
    python scripts/run_client.py llama FILE.gguf TOKENS.npy OUT.npy
    python scripts/run_client.py speed FILE.gguf [TOKENS]
    python scripts/run_client.py vllm DTYPE FOLDER TOKENS.npy OUT.npy [FOLDER TOKENS.npy OUT.npy ...]
    python scripts/run_client.py vllm-loader DTYPE FOLDER TOKENS.npy OUT.npy [...]

It needs numpy and the client alone. Tokens are [B, L]; what comes out are the log probabilities [B, L, V] after each.
"""

import os
import runpy
import sys
import time
from importlib import import_module
from importlib.metadata import version as version_of
from typing import Any

import numpy as np

FLOAT32 = 0  # of a cache, as ggml numbers types; llama.cpp's default is float16


def version(client: str, checkout: str = "") -> str:
    """Return the version of a client, of a converter its checkout's name; an ImportError where it is missing."""
    if client == "converter":
        use_converter(checkout)
        return os.path.basename(os.path.realpath(checkout))
    name = {"llama": "llama_cpp", "vllm": "vllm"}[client]
    return str(getattr(import_module(name), "__version__", "") or version_of(client))


def use_converter(checkout: str) -> Any:
    """Return the module of llama.cpp's converter that has its classes."""
    sys.path[:0] = [checkout, os.path.join(checkout, "gguf-py")]
    return import_module("conversion.base")


def convert(checkout: str, folder: str, out: str) -> None:
    """Write the checkpoint as float32 GGUF, by llama.cpp's own converter, which refuses unknown tokenizers otherwise."""
    use_converter(checkout).TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(os.path.join(checkout, "convert_hf_to_gguf.py"), run_name="__main__")


def tensors(checkout: str, file: str, expected: str) -> str:
    """Return how many of the expected tensors the GGUF file holds, blocks of fewer bits to the rounding of bfloat16."""
    sys.path[:0] = [os.path.join(checkout, "gguf-py")]
    from gguf import GGUFReader
    from gguf.quants import dequantize

    held = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    wanted, wrong = np.load(expected), []
    for name, value in wanted.items():
        if name not in held:
            wrong.append(name)
        elif held[name].data.dtype == value.dtype:
            wrong += [] if np.array_equal(held[name].data, value) else [name]
        else:
            found = dequantize(held[name].data, held[name].tensor_type)
            scale = held.get(name.replace(".weight", ".scale"))  # of each expert
            found = found if scale is None else found * scale.data[:, None, None]
            wrong += [] if np.allclose(found, value, rtol=2**-8) else [name]
    message = f"{len(wanted.files) - len(wrong)} of {len(wanted.files)}"
    return f"{message}; not {wrong[0]}" if wrong else message


def llama(file: str, tokens: str, out: str) -> None:
    """Save log probabilities of llama.cpp, through llama-cpp-python."""
    from llama_cpp import Llama

    batch = np.load(tokens)
    model = Llama(
        file, n_ctx=batch.shape[1], n_batch=batch.shape[1], n_threads=1, logits_all=True, verbose=False,
        type_k=FLOAT32, type_v=FLOAT32,
    )  # fmt: skip
    found = []
    for row in batch:
        model.reset()
        model.eval(row.tolist())
        logits = np.array(model.scores[: len(row)], dtype=np.float64)
        logits -= logits.max(-1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    np.save(out, np.stack(found))


def speed(file: str, tokens: str = "64") -> float:
    """Return the tokens a second that llama.cpp writes after the first, greedily."""
    from llama_cpp import Llama

    model = Llama(file, n_ctx=512, n_threads=os.cpu_count(), verbose=False)
    written = model.generate(model.tokenize(b"Once upon a time"), temp=0.0)
    next(written)
    begin = time.perf_counter()
    for _ in range(int(tokens)):
        next(written)
    return int(tokens) / (time.perf_counter() - begin)


def vllm(dtype: str, *arguments: str) -> None:
    """Log probabilities of vLLM for one checkpoint after another; where it fails, the reason is beside its OUT."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm.distributed import cleanup_dist_env_and_memory

    for folder, tokens, out in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        try:
            save_answers(dtype, folder, tokens, out)
        except Exception as error:
            with open(f"{out}.txt", "w", encoding="utf-8") as reason:
                reason.write(f"{type(error).__name__}: {error}")
        cleanup_dist_env_and_memory()


def save_answers(dtype: str, folder: str, tokens: str, out: str) -> None:
    """Save vLLM's log probabilities; those after the last token come with the token that it draws."""
    from vllm import LLM, SamplingParams

    batch = np.load(tokens)
    model = LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=batch.shape[1] + 1, max_logprobs=-1,
        max_num_seqs=len(batch), max_num_batched_tokens=max(batch.size, 128), enable_prefix_caching=False,
        gpu_memory_utilization=0.2, disable_log_stats=True,
    )  # fmt: skip
    every = {"logprobs": -1, "prompt_logprobs": -1, "detokenize": False}
    prompts = [{"prompt_token_ids": row.tolist()} for row in batch]
    answers = model.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, **every))
    found = []
    for answer in answers:
        steps = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
        found.append([[step[token].logprob for token in range(len(step))] for step in steps])
    np.save(out, np.array(found))


def vllm_loader(dtype: str, *arguments: str) -> None:
    """Do the same with vLLM's own reading of quantised experts, dequantised after it, as it has no kernel on a CPU."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, nvfp4

    package = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    chosen = {
        "wna16": ("select_wna16_moe_backend", int_wna16.WNA16MoEBackend.MARLIN),
        "w8a8_fp8": ("select_fp8_moe_backend", fp8.Fp8MoeBackend.TRITON),
        "w4a4_nvfp4": ("select_nvfp4_moe_backend", nvfp4.NvFp4MoeBackend.MARLIN),
    }
    for name, (select, backend) in chosen.items():
        module = import_module(f"{package}.compressed_tensors_moe_{name}")
        setattr(module, select, lambda *_, backend=backend, **__: (backend, None))
        module.check_moe_marlin_supports_config = lambda *_, **__: True
    methods = import_module(f"{package}.compressed_tensors_moe").CompressedTensorsMoEMethod
    choose = methods.get_moe_method

    def get_moe_method(config: Any, layer: Any, layer_name: str) -> Any:
        method = choose(config, layer, layer_name)
        method.process_weights_after_loading = lambda layer: use_plain(method, config, layer)
        return method

    methods.get_moe_method = staticmethod(get_moe_method)
    vllm(dtype, *arguments)


def use_plain(method: Any, config: Any, layer: Any) -> None:
    """Dequantise the experts of a loaded layer, and let vLLM compute with them as with a plain checkpoint's."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    scheme = next(iter(config.target_scheme_map.values()))
    form, moe = scheme["format"], method.moe
    quantised = QuantizationScheme(targets=["Linear"], weights=scheme["weights"], format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    parameters = dict(layer.named_parameters())
    for side, columns in (("w13", moe.hidden_dim), ("w2", moe.intermediate_size_per_partition)):
        names = [name for name in parameters if name.startswith(side)]
        stored = {name.removeprefix(f"{side}_"): parameters[name] for name in names}
        rows = stored["weight" if "weight" in stored else "weight_packed"].shape[1]
        plain = []
        for expert in range(moe.num_experts):
            tensors = {name: value[expert] for name, value in stored.items()}
            if "weight_shape" in tensors:
                tensors["weight_shape"] = torch.tensor([rows, columns])
            if "weight_global_scale" in tensors:  # of gate and up, as vLLM does
                tensors["weight_global_scale"] = tensors["weight_global_scale"].flatten()[:1]
            plain.append(compressor.decompress(tensors, quantised)["weight"])
        for name in names:
            delattr(layer, name)
        value = torch.stack(plain).to(moe.in_dtype)
        layer.register_parameter(f"{side}_weight", torch.nn.Parameter(value, requires_grad=False))
    layer.quant_method = UnquantizedFusedMoEMethod(moe)
    layer.quant_method.process_weights_after_loading(layer)


def main() -> None:
    """Do what the command line asks for; what is said goes to the last line of stdout."""
    does, *arguments = sys.argv[1:]
    functions: tuple[Any, ...] = (version, convert, tensors, llama, speed, vllm, vllm_loader)
    calls = {function.__name__.replace("_", "-"): function for function in functions}
    print(calls[does](*arguments) or "done")


if __name__ == "__main__":
    main()
