"""The packages that compressing doesn't need; each is installed by an extra of moe-compressor."""

from importlib.util import find_spec

from compressor.errors import CompressionError

EXTRAS = {
    "lm_eval": "eval",
    "accelerate": "eval",
    "matplotlib": "report",
    "networkx": "report",
    "jinja2": "report",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "gguf": "gguf",
    "compressed_tensors": "quantized",
    "backports.zstd": "inspect",
}
TASKS = ("lm_eval", "accelerate")  # for tasks of lm-eval


def require(*packages: str) -> None:
    """Raise `CompressionError` naming the extra if a package isn't installed; nothing is imported.

    A command calls it first, before it imports what computes.
    """
    for package in packages:
        spec = find_spec(package) if find_spec(package.split(".")[0]) else None
        if spec is None or spec.origin is None:  # a mere folder of that name has no origin
            name = package.replace("_", "-")
            extra = EXTRAS.get(package)  # none of a plugin's own package
            wanted = f"'moe-compressor[{extra}]'" if extra else name
            raise CompressionError(f"{name} is missing; pip install {wanted}")
