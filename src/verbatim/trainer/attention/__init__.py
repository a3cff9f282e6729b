"""Computes attention over packed samples: rows, and prefix trees with C or torch on a CPU and FlexAttention on CUDA."""
