"""Samples in this process: batched decoding with a KV cache in PyTorch, on a thread."""
