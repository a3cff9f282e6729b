"""Samples in this process, on a thread: batched decoding with a KV cache, by the compiled kernel where it fits, else in
PyTorch. Read first: `decoder.py`, `forward.py` (which of the two), `sampling.py`."""
