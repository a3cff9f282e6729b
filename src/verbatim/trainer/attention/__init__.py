"""Computes attention over packed samples, as rows or as prefix trees. Trees use C or torch on a CPU, FlexAttention on
CUDA."""
