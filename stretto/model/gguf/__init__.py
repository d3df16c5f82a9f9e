"""GGUF, the format of llama.cpp: files are read as Hugging Face folders and written from checkpoints."""
