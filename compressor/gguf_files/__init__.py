"""GGUF files, the format of llama.cpp: what is in them, and the same with fewer experts, byte for byte."""
