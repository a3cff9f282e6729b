"""Re-exports the process group in which a trainer broadcasts weights to a sampler's servers. Both sides run that
module, so it is in the vLLM plug-in's folder and imports only torch."""

from verbatim.inference.vllm.plugin.verbatim_weight_group import GroupOver, WeightGroup, address_towards

__all__ = ["GroupOver", "WeightGroup", "address_towards"]
