"""The embedded sampler: batched decoding with a KV cache in PyTorch, on a thread of this process."""
