"""The embedded engine. It samples in this process on a separate thread, with batched decoding over a KV cache. It
computes with the compiled kernel if the kernel supports the model and the machine, otherwise in PyTorch. Start with
`decoder.py`, `forward.py` (chooses between kernel and PyTorch) and `sampling.py`."""
