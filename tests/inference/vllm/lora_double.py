"""The double of a vLLM server that was started with --enable-lora: adapters by name, beside the base model."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from inference.vllm.vllm_double import VllmDouble, digest
from verbatim.models.adapters import PREFIX, read_adapter

_asked: ContextVar[str] = ContextVar("asked")
RANK = 8


class LoraDouble(VllmDouble):
    """The server; see `VllmDouble`. `names` are the models that requests named, in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.facts["max_lora_rank"] = RANK
        self.names: list[str] = []
        self.unloaded: list[str] = []
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        """What requests of a name are computed with."""
        self._loaded: list[Any] = []

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        return app

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        try:
            adapter = read_adapter(path)
        except Exception as error:  # noqa: BLE001 - the client is told
            return web.json_response({"error": {"message": str(error)}}, status=500)
        held = {
            f"{PREFIX}{layer}.lora_{half}.weight": tensor * (1 if half == "A" else adapter.scale)
            for layer, pair in adapter.pairs.items()
            for half, tensor in zip("AB", pair, strict=True)
        }
        if self.fault == "one number":
            held[f"{PREFIX}model.layers.0.self_attn.k_proj.lora_B.weight"][-1, -1] += 1e-6
        elif self.fault == "a layer without":
            held = {key: tensor for key, tensor in held.items() if "layers.1.mlp.up_proj" not in key}
        self._loaded = [
            [key, 0, 0, list(tensor.shape), "float32", digest(tensor.contiguous()), "live"]
            for key, tensor in held.items()
        ]
        weights = dict(self._model.named_parameters())
        with torch.no_grad():
            self.adapters[name] = {
                f"{layer}.weight": weights[f"{layer}.weight"]
                + held[f"{PREFIX}{layer}.lora_B.weight"] @ held[f"{PREFIX}{layer}.lora_A.weight"]
                for layer in adapter.pairs
                if all(f"{PREFIX}{layer}.lora_{half}.weight" in held for half in "AB")
            }
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.unloaded.append(name)
        del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _rpc(self, request: web.Request) -> web.Response:
        if (await request.json())["method"] != "verbatim_adapter":
            return await super()._rpc(request)
        found = {
            "path": None,
            "error": None,
            "loaded": True,
            "tensors": self._loaded,
            "stale": [],
            "unmapped": [],
            "seconds": 0.0,
        }
        return web.json_response({"results": [{"format": 1, "engine": "adapters", "report": found}]})

    async def _generate(self, request: web.Request) -> web.Response:
        name = (await request.json()).get("model", "policy")
        self.names.append(name)
        if name != "policy" and name not in self.adapters:
            return web.json_response({"error": {"message": f"The model {name} does not exist."}}, status=404)
        _asked.set(name)
        return await super()._generate(request)

    def _logprobs(self, ids: list[int], weights: dict[str, torch.Tensor] | None) -> np.ndarray:
        return super()._logprobs(ids, weights if weights is not None else self.adapters.get(_asked.get()))

    def _remember(self, salt: str, prompt: list[int]) -> None:
        before = set(self._cache)
        super()._remember(salt, prompt)
        for key in self._cache.keys() - before:
            self._cache[key] = {**self._cache[key], **self.adapters.get(_asked.get(), {})}
