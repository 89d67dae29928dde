"""GGUF files, the format of llama.cpp: what is in them, and the same with fewer experts, byte for
byte.

- `header.py`: metadata and the places of tensors; `blocks.py`: the tensors of experts and routers,
  and `inspect`;
- `choosing.py`: plans by an importance matrix, or made on the checkpoint and fitted to the file;
- `writing.py`: the smaller file, and the functions of Python; `command.py`: what commands do with a
  GGUF file.
"""
