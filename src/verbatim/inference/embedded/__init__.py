"""The embedded engine: samples in this process on a thread of its own, with batched decoding over a KV cache. Computes
with the compiled kernel if it fits, otherwise in PyTorch. Start with `decoder.py`, `forward.py` (chooses between the
two) and `sampling.py`."""
