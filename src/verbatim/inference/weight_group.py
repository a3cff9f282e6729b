"""Re-exports the process group in which a trainer broadcasts weights to a sampler's servers. The module is in the vLLM
plug-in's folder, because both sides run it; it uses only torch."""

from verbatim.inference.vllm.plugin.verbatim_weight_group import GroupOver, WeightGroup, address_towards

__all__ = ["GroupOver", "WeightGroup", "address_towards"]
