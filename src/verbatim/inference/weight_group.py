"""The group of processes in which a trainer sends its weights to a sampler's servers. The file lies with vLLM's plugin,
because both sides run it; it uses only torch."""

from verbatim.inference.vllm.plugin.verbatim_weight_group import GroupOver, WeightGroup, address_towards

__all__ = ["GroupOver", "WeightGroup", "address_towards"]
