"""The sampler that runs inside this process: batched decoding with a KV cache, in PyTorch."""
