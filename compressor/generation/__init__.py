"""The next token, by stock transformers or by ONNX Runtime."""
