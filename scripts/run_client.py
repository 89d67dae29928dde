"""Run one real client on one checkpoint; `scripts.check_clients` calls it with the Python that has the client.

    python scripts/run_client.py version llama|vllm|converter [CHECKOUT]
    python scripts/run_client.py convert CHECKOUT FOLDER OUT.gguf
    python scripts/run_client.py tensors CHECKOUT FILE.gguf EXPECTED.npz
    python scripts/run_client.py llama FILE.gguf TOKENS.npy OUT.npy
    python scripts/run_client.py vllm DTYPE FOLDER TOKENS.npy OUT.npy [FOLDER TOKENS.npy OUT.npy ...]
    python scripts/run_client.py vllm-loader DTYPE FOLDER TOKENS.npy OUT.npy [...]

It needs numpy and the client alone. Tokens are [B, L]; what comes out are the log probabilities [B, L, V] after each.
"""

import contextlib
import os
import runpy
import sys
from importlib.metadata import version as version_of
from typing import Any

import numpy as np

FLOAT32 = 0  # of a cache, as ggml numbers types; llama.cpp's default is float16


def converter_version(checkout: str) -> str:
    """The converter can be loaded; it has no version but its checkout's."""
    _use_converter(checkout)
    return os.path.basename(os.path.realpath(checkout))


def _use_converter(checkout: str) -> Any:
    sys.path[:0] = [checkout, os.path.join(checkout, "gguf-py")]
    from conversion import base  # type: ignore[import-not-found]

    return base


def convert(checkout: str, folder: str, out: str) -> None:
    """The checkpoint as float32 GGUF, by llama.cpp's own converter.

    It knows tokenizers by a hash and refuses others, whatever the weights are. Tokens go in as numbers here, so any
    kind of byte-level tokenizer may stand for one that it does not know.
    """
    base = _use_converter(checkout)
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(os.path.join(checkout, "convert_hf_to_gguf.py"), run_name="__main__")


def tensors(checkout: str, file: str, expected: str) -> str:
    """How many of the expected tensors the GGUF file holds, and which it does not.

    Bit for bit, or, where the file has them in blocks of fewer bits, to the rounding of bfloat16.
    """
    sys.path[:0] = [os.path.join(checkout, "gguf-py")]
    from gguf import GGUFReader
    from gguf.quants import dequantize

    held = {tensor.name: tensor for tensor in GGUFReader(file).tensors}

    def alike(name: str, value: Any) -> bool:
        if name not in held:
            return False
        if held[name].data.dtype == value.dtype:
            return np.array_equal(held[name].data, value)
        found = dequantize(held[name].data, held[name].tensor_type)
        if (scale := held.get(name.replace(".weight", ".scale"))) is not None:  # of each expert
            found = found * scale.data[:, None, None]
        return np.allclose(found, value, rtol=2**-8)

    wanted = np.load(expected)
    wrong = [name for name in wanted if not alike(name, wanted[name])]
    message = f"{len(wanted.files) - len(wrong)} of {len(wanted.files)}"
    return f"{message}; not {wrong[0]}" if wrong else message


def _log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def llama(file: str, tokens: str, out: str) -> None:
    """Log probabilities of llama.cpp, through llama-cpp-python."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    batch = np.load(tokens)
    model = Llama(
        file, n_ctx=batch.shape[1], n_batch=batch.shape[1], n_threads=1, logits_all=True, verbose=False,
        type_k=FLOAT32, type_v=FLOAT32,
    )  # fmt: skip
    found = []
    for row in batch:
        model.reset()
        model.eval(row.tolist())
        found.append(_log_softmax(np.array(model.scores[: len(row)])))
    np.save(out, np.stack(found))


def vllm(dtype: str, *arguments: str) -> None:
    """Log probabilities of vLLM for one checkpoint after another; where it fails, the reason is beside its OUT."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

    for folder, tokens, out in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        try:
            _vllm(dtype, folder, tokens, out)
        except Exception as error:
            with open(f"{out}.txt", "w", encoding="utf-8") as reason:
                reason.write(f"{type(error).__name__}: {error}")
        cleanup_dist_env_and_memory()


def _vllm(dtype: str, folder: str, tokens: str, out: str) -> None:
    """Those after the last token come with the token that it draws."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

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
    """The same with vLLM's own reading of quantised experts, and a plain kernel for what it has none for on a CPU.

    Configuration, names, shapes and placing of all tensors are vLLM's; what has arrived is dequantised as it lies.
    """
    from importlib import import_module

    from vllm.model_executor.layers.fused_moe.oracle import (  # type: ignore[import-not-found]
        fp8,
        int_wna16,
        nvfp4,
    )

    package = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    chosen = {
        "wna16": ("select_wna16_moe_backend", int_wna16.WNA16MoEBackend.MARLIN),
        "w8a8_fp8": ("select_fp8_moe_backend", fp8.Fp8MoeBackend.TRITON),
        "w4a4_nvfp4": ("select_nvfp4_moe_backend", nvfp4.NvFp4MoeBackend.MARLIN),
    }
    for name, (select, backend) in chosen.items():
        module = import_module(f"{package}.compressed_tensors_moe_{name}")
        setattr(module, select, lambda *_, backend=backend, **__: (backend, None))
        module.check_moe_marlin_supports_config = lambda *_, **__: True  # type: ignore[attr-defined]
    methods = import_module(f"{package}.compressed_tensors_moe").CompressedTensorsMoEMethod
    own = methods.get_moe_method

    def get_moe_method(config: Any, layer: Any, layer_name: str) -> Any:
        method = own(config, layer, layer_name)
        method.process_weights_after_loading = lambda layer: _use_plain(method, config, layer)
        return method

    methods.get_moe_method = staticmethod(get_moe_method)
    vllm(dtype, *arguments)


def _use_plain(method: Any, config: Any, layer: Any) -> None:
    """Dequantise the experts of a loaded layer, and let vLLM compute with them as with a plain checkpoint's."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod  # type: ignore[import-not-found]

    scheme = next(iter(config.target_scheme_map.values()))
    weights, form = scheme["weights"], scheme["format"]
    quantised = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    parameters = dict(layer.named_parameters())
    moe = method.moe
    for side, columns in (("w13", moe.hidden_dim), ("w2", moe.intermediate_size_per_partition)):
        names = [name for name in parameters if name.startswith(side)]
        stored = {name.removeprefix(f"{side}_"): parameters[name] for name in names}
        rows = stored["weight" if "weight" in stored else "weight_packed"].shape[1]
        plain = []
        for expert in range(moe.num_experts):
            own = {name: value[expert] for name, value in stored.items()}
            if "weight_shape" in own:
                own["weight_shape"] = torch.tensor([rows, columns])
            if "weight_global_scale" in own:  # of gate and up, as vLLM does
                own["weight_global_scale"] = own["weight_global_scale"].flatten()[:1]
            plain.append(compressor.decompress(own, quantised)["weight"])
        for name in names:
            delattr(layer, name)
        value = torch.stack(plain).to(moe.in_dtype)
        layer.register_parameter(f"{side}_weight", torch.nn.Parameter(value, requires_grad=False))
    layer.quant_method = UnquantizedFusedMoEMethod(method.moe)
    layer.quant_method.process_weights_after_loading(layer)


def version(client: str, checkout: str = "") -> str:
    """The version of a client; an ImportError where it is missing."""
    if client == "converter":
        return converter_version(checkout)
    module = __import__({"llama": "llama_cpp", "vllm": "vllm"}[client])
    with contextlib.suppress(Exception):
        return str(module.__version__)
    return version_of(client)


def main() -> None:
    """Do what the command line asks for; what is said goes to the last line of stdout."""
    does, *arguments = sys.argv[1:]
    calls = {
        "version": version, "convert": convert, "tensors": tensors, "llama": llama, "vllm": vllm,
        "vllm-loader": vllm_loader,
    }  # fmt: skip
    print(calls[does](*arguments) or "done")  # type: ignore[operator]


if __name__ == "__main__":
    main()
