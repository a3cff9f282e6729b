"""Loads published weights into vLLM, and reports a digest of each tensor that vLLM's kernels were built from.

This folder is put on the PYTHONPATH of vLLM's environment, where Verbatim is not installed, so the folder's modules
import only vLLM and torch. vLLM finds `register` through the entry point `vllm.general_plugins`. A server uses the
plug-in with

    --weight-transfer-config '{"backend": "verbatim_files"}' --worker-extension-cls verbatim_vllm.WeightReport
"""

from typing import Any

FORMAT = 1
"""Version of the report's format. A client that expects a different version refuses the server."""


def register() -> None:
    """Register the weight-transfer engines. vLLM calls this in each of its processes, possibly twice in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in (("verbatim_files", "FilesEngine"), ("verbatim_broadcast", "BroadcastEngine")):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "verbatim_vllm_engines", engine)


class WeightReport:
    """Methods of a vLLM worker that `/collective_rpc` calls by name. The class has no state, because it is mixed into
    the worker's class."""

    def verbatim_report(self) -> dict[str, Any]:
        """The report of this worker's last weight update: what its kernels were built from."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        report = getattr(engine, "report", None)
        return {"format": FORMAT, "engine": type(engine).__name__, "report": report}

    def verbatim_adapter(self) -> dict[str, Any]:
        """The report of this worker's newest LoRA adapter."""
        from verbatim_vllm_adapters import report

        manager = self.model_runner.lora_manager  # type: ignore[attr-defined]
        return {"format": FORMAT, "engine": "adapters", "report": report(manager._adapter_manager)}

    def _adapts_head(self) -> bool:
        """True if the output head is wrapped for adapters."""
        manager = getattr(self.model_runner, "lora_manager", None)  # type: ignore[attr-defined]
        return manager is not None and any("lm_head" in name for name in manager._adapter_manager.modules)

    def verbatim_facts(self) -> dict[str, Any]:
        """How this server was started: the settings that exactness depends on."""
        config = self.vllm_config  # type: ignore[attr-defined]
        model, transfer = config.model_config, config.weight_transfer_config
        return {
            "format": FORMAT,
            "model": str(model.model),
            "vocab_size": int(model.get_vocab_size()),
            "max_model_len": int(model.max_model_len),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "logprobs_mode": str(model.logprobs_mode),
            "generation_config": str(model.generation_config),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "returns_routed_experts": bool(config.aux_output_config.enable_return_routed_experts),
            "returns_kept_sets": bool(getattr(model, "return_sampling_mask", False)),  # older releases lack it
            "speculative": config.speculative_config is not None,
            "max_lora_rank": None if config.lora_config is None else int(config.lora_config.max_lora_rank),
            "adapts_head": self._adapts_head(),
            "weight_transfer": None if transfer is None else str(transfer.backend),
            "nccl": _nccl(),
            "unsupported_heads": _unsupported_heads(model),
        }


def _nccl() -> str | None:
    """Version of torch's NCCL, which must be the same on all ranks of a group; None without CUDA."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _unsupported_heads(model: Any) -> str | None:
    """Why the attention kernels for CPUs cannot compute this model; None if they can.

    vLLM checks whether its other attention backends support a model, but it uses its only backend for CPUs without such
    a check, so the server would crash at the first request.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or model.use_mla:
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = int(model.get_head_size())
    if CPUAttentionBackend.supports_head_size(size):
        return None
    return f"{size}, and vLLM's attention for CPUs supports {CPUAttentionBackend.get_supported_head_sizes()}"
