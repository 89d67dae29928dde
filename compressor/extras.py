"""The packages that compressing doesn't need; each is installed by an extra of moe-compressor."""

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
}


def require(*packages: str) -> None:
    """Raise `CompressionError` naming the extra if a package can't be imported; call it before anything long starts."""
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            missing = f"{package.replace('_', '-')} is missing"
            raise CompressionError(f"{missing}; pip install 'moe-compressor[{EXTRAS[package]}]'") from error
