"""A cheap double of the routes of a vLLM server: a tiny torch model behind them, and faults that can be planted.

`test_real_server.py` holds it against the real server's answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from verbatim.inference.http.protocol import GENERATE, UNKNOWN_LOGPROB
from verbatim.inference.vllm.command import PLUGIN
from waiting import HANGS

for folder in (PLUGIN, Path(__file__).parent / "faulty_plugin"):
    sys.path.append(str(folder))
from verbatim_faulty_tensors import wrong  # noqa: E402
from verbatim_vllm_answers import is_asked, packed  # noqa: E402
from verbatim_vllm_digest import digest  # noqa: E402
from verbatim_weight_group import WeightGroup  # noqa: E402

BLOCK = 128
"""Tokens of a block of the prefix cache, as on a CPU."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class VllmDouble:
    """The server. Attributes may be set at any time.

    Args:
        folder: The weights that it starts with.
    """

    def __init__(self, folder: Path) -> None:
        self.fault = ""
        self.hangs_at = ""
        self.fails_at = ""
        self.fails_once = False
        """Whether the first failure there is the last."""
        self.gates: dict[str, asyncio.Event] = {}
        self.key: str | None = None
        self.calls: list[str] = []
        self.answered: list[int] = []
        """Characters of each answer."""
        self.running = asyncio.Event()
        self.running.set()
        self.version = "default"
        self.asleep: set[str] = set()
        self.says_calls = False
        self.in_flight = 0
        self.says: list[int] = []
        """Ids that are drawn next, instead of random ones."""
        self._in_flight_for_ids = 0
        self.keeps_blocks = False
        self.drawn = 0
        """Tokens of all requests, also of those that go on."""
        self.num_held = 0
        """Requests that wait for `release`."""
        self._most_drawn = math.inf
        self._released = asyncio.Event()
        self.draws_for_others = False
        """Whether it has drawn a token more whenever its figures are asked for."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tied = bool(self._model.config.tie_word_embeddings)
        if self.tied:  # a head of its own, as a packed kernel is
            self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().clone())
        self._names = set(load_file(folder / "model.safetensors"))
        self._report: dict[str, Any] | None = None
        self._is_updating = False
        self._loaded_path = str(folder)
        self._group: WeightGroup | None = None
        self.after_tensor: Callable[[int], None] = lambda number: None
        """Called with the number of tensors that have arrived in a broadcast."""
        self.received: dict[str, torch.Tensor] | None = None
        """What the last broadcast brought, as it arrived; None after a folder."""
        self.on_version: Callable[[str], None] = lambda version: None
        self._cache: dict[tuple[str, bytes], dict[str, torch.Tensor]] = {}
        self.facts = {
            "format": 1,
            "model": str(folder),
            "vocab_size": int(self._model.config.vocab_size),
            "max_model_len": 512,
            "dtype": "float32",
            "quantization": None,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "prefix_caching": True,
            "chunked_prefill": True,
            "speculative": False,
            "max_lora_rank": None,
            "adapts_head": False,
            "weight_transfer": "verbatim_files",
            "returns_routed_experts": False,
            "returns_kept_sets": False,
            "nccl": None,
            "unsupported_heads": None,
        }
        self.missing: set[str] = set()
        self.takes_ids = True
        self.own_key: str | None = None
        self.says_cached_tokens = True
        self.packs = True
        """Whether it has our middleware, which packs answers."""
        self.queries = self.hits = self.generated = 0

    def hold(self, after: int) -> None:
        """Draw so many tokens of each request, and no more of it until `release`."""
        self._most_drawn = after
        self._released.clear()

    def release(self) -> None:
        """Draw on."""
        self._most_drawn = math.inf
        self._released.set()

    # ---- routes

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/get_world_size", self._world_size)
        for path, answer in (
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/start_weight_update", self._start),
            ("/update_weights", self._update),
            ("/finish_weight_update", self._finish),
            ("/update_weight_version", self._set_version),
            ("/reset_prefix_cache", self._reset),
            ("/collective_rpc", self._rpc),
            ("/sleep", self._sleep),
            ("/wake_up", self._wake_up),
            (GENERATE, self._generate),
        ):
            app.router.add_post(path, answer)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if self.says_calls:
            print(request.path_qs, flush=True)
        keyless = self.key is None or request.path == "/health"
        if not keyless and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "this server needs a key"}}, status=401)
        if request.path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        if (
            self.own_key is not None
            and request.path.startswith(("/v1", "/inference"))
            and (request.headers.get("Authorization") != f"Bearer {self.own_key}")
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path.startswith("/inference") and not self.takes_ids:
            said = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            error = {"message": said, "type": "PermissionDeniedError", "param": None, "code": 403}
            return web.json_response({"error": error}, status=403)
        if request.path == self.hangs_at:
            await asyncio.Event().wait()
        if request.path in self.gates:
            await self.gates[request.path].wait()
        if request.path == self.fails_at:
            self.fails_at = "" if self.fails_once else self.fails_at
            return web.json_response({"error": {"message": "it burns", "code": 500}}, status=500)
        response: web.StreamResponse = await handler(request)
        if isinstance(response, web.Response):
            self.answered.append(len(response.text or ""))
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        self.generated += self.draws_for_others
        figures = {
            "num_requests_running": self.in_flight,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.5,
            "prefix_cache_queries_total": self.queries,
            "prefix_cache_hits_total": self.hits,
            "generation_tokens_total": self.generated,
        }
        lines = [f'vllm:{name}{{engine="0",model_name="policy"}} {float(value)}' for name, value in figures.items()]
        return web.Response(text="\n".join(["# HELP vllm:num_requests_running Number of requests", *lines]))

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.facts["max_model_len"]}]})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _pause(self, _: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        """As on a GPU at level 2: what the memory held is gone."""
        level = int(request.query.get("level", "1"))
        assert (level, request.query["mode"]) == (2, "wait")
        while self.in_flight:  # noqa: ASYNC110 - requests set no event
            await asyncio.sleep(0.01)
        self.running.clear()
        self.asleep = {"weights", "kv_cache"}
        self._cache.clear()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(math.nan)
        return web.json_response({"status": "sleeping", "level": level})

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", None)
        if self.fault != "stays asleep":
            self.asleep -= set(tags or self.asleep)
        if not self.asleep:
            self.running.set()
        return web.json_response({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.asleep) or not self.running.is_set()})

    async def _start(self, _: web.Request) -> web.Response:
        if self._is_updating:
            said = "start_weight_update called while a weight update is already active. Call finish first."
            return web.json_response({"error": {"message": said, "code": 500}}, status=500)
        self._is_updating = True
        if self.fault != "nothing done":
            self._report = None
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if "weights" in self.asleep:  # memory that is not there
            return web.json_response(
                {"error": {"message": "CUDA error: an illegal memory access", "code": 500}}, status=500
            )
        if "group" in info:
            await asyncio.to_thread(self._receive, info["group"])
            return web.json_response({"message": "Weights updated"})
        path, self.received = info["path"], None
        if self.fault not in ("update skipped", "nothing done"):
            self._load(self._loaded_path if self.fault == "weights before" else path)
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, _: web.Request) -> web.Response:
        self._is_updating = False
        return web.json_response({"message": "Weight update finished"})

    async def _set_version(self, request: web.Request) -> web.Response:
        if self.fault == "version not advanced":
            return web.json_response({"success": True})
        self.version = (await request.json())["new_version"]
        self.on_version(self.version)
        return web.json_response({"success": True, "new_version": self.version})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.fault == "stale prefix":
            return web.json_response({"success": True})
        if self.keeps_blocks and request.query["reset_running_requests"] == "false":
            return web.json_response({"success": False})
        self._cache.clear()
        return web.json_response({"success": True})

    async def _rpc(self, request: web.Request) -> web.Response:
        method = (await request.json())["method"]
        if method == "verbatim_facts" and self.fault != "no plug-in":
            return web.json_response({"results": [self.facts]})
        if method == "verbatim_report":
            return web.json_response({"results": [{"format": 1, "engine": "FilesEngine", "report": self._report}]})
        return web.json_response({"error": {"message": f"no attribute {method!r}", "code": 500}}, status=500)

    # ---- weights

    def _load(self, path: str) -> None:
        found: dict[str, Any] = {
            "path": path,
            "error": None,
            "loaded": True,
            "tensors": [],
            "stale": [],
            "unmapped": [],
            "seconds": 0.0,
        }
        self._report = found
        try:
            raw = (Path(path) / "model.safetensors").read_bytes()
            published = load(raw[: len(raw) // 2] if self.fault == "half a file" else raw)
            missing = self._names - set(published)
            if missing:
                raise ValueError(f"the folder has no tensors for {sorted(missing)[0]}")
        except Exception as error:  # noqa: BLE001 - the client is told
            found.update(error=f"{type(error).__name__}: {error}", loaded=False)
            return
        self._loaded_path = path
        try:
            self._fill(dict(wrong(self.fault, published)), found)
        except RuntimeError as error:
            found["error"] = f"RuntimeError: {error}"

    def _receive(self, about: dict[str, Any]) -> None:
        """As the plug-in's engine does: what goes wrong stands in the report."""
        self.received, names = {}, self._names
        self._report = {
            "path": None,
            "error": None,
            "loaded": True,
            "tensors": [],
            "stale": [],
            "unmapped": [],
            "seconds": 0.0,
        }
        try:
            if self._group is None or self._group.name != about["name"]:
                self._group = None
                store = dist.TCPStore(
                    about["host"],
                    about["port"],
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=about["seconds"]),
                )
                self._group = WeightGroup(
                    store,
                    about["name"],
                    rank=about["first_rank"],
                    size=about["size"],
                    kind=about["kind"],
                    device=torch.device("cpu"),
                    seconds=about["seconds"],
                )
            self._group.begin()
            for name, (dtype, shape) in self._group.layout().items():
                self.after_tensor(len(self.received))
                self.received[name] = self._group.receive(dtype, shape)
            if self.received.keys() != names:
                raise ValueError(f"other tensors: {sorted(self.received.keys() ^ names)}")
            self._fill(dict(wrong(self.fault, self.received)), self._report)
        except Exception as error:  # noqa: BLE001 - the client is told
            self._report["error"] = f"{type(error).__name__}: {error}"
            if self._group is not None:
                self._group.close(str(error))
                self._group = None

    def _fill(self, tensors: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
        held = dict(self._model.named_parameters())
        for name in sorted(self._names):
            if name in tensors:
                with torch.no_grad():
                    held[name].copy_(tensors[name])
            if name in tensors or "norm" in name:
                found["tensors"].append(self._entry(name, held[name], "live" if "norm" in name else "kernel"))
            else:
                found["stale"].append(name)
        if self.tied and self.fault == "stale head":
            found["stale"].append(f"{EMBEDDING} (as lm_head)")
        elif self.tied:
            with torch.no_grad():
                held[HEAD].copy_(held[EMBEDDING])
            found["tensors"].append(self._entry(EMBEDDING, held[HEAD], "kernel"))

    @staticmethod
    def _entry(name: str, tensor: torch.Tensor, source: str) -> list[Any]:
        return [name, 0, 0, list(tensor.shape), "float32", digest(tensor), source]

    # ---- tokens

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params, ids = body["sampling_params"], list(body["token_ids"])
        salt = "" if self.fault == "stale prefix" else body.get("cache_salt", "")
        if self.facts["returns_kept_sets"] and (said := _unbounded(params)):
            error = {"message": said, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        self.in_flight += 1
        self._in_flight_for_ids += "logprob_token_ids" in params
        try:
            await self.running.wait()
            answer = await self._answer(params, ids, salt)
            if self.packs and is_asked(body, _with_defaults(params), output_mode="tokens", stream=False):
                _pack(answer)
            return web.json_response(answer)
        finally:
            self.in_flight -= 1
            self._in_flight_for_ids -= "logprob_token_ids" in params

    async def _answer(self, params: dict[str, Any], prompt: list[int], salt: str) -> dict[str, Any]:
        scored = params.get("prompt_logprobs") is not None
        cached, weights = (0, None) if scored else self._cached(salt, prompt)
        content, versions, masks, ids, of_prompt = [], [], [], list(prompt), None
        rng = np.random.default_rng(params.get("seed", self.calls.count(GENERATE)))
        for _ in range(params["max_tokens"]):
            await asyncio.sleep(0)  # others work
            while len(content) >= self._most_drawn or not self.running.is_set():
                if len(content) >= self._most_drawn:
                    self.num_held += 1
                    await self._released.wait()
                    self.num_held -= 1
                await self.running.wait()
            table = self._logprobs(ids, weights)
            logprobs, of_prompt = processed(table[-1], params), table if of_prompt is None else of_prompt
            token = int(rng.choice(len(logprobs), p=np.exp(logprobs) / np.exp(logprobs).sum()))
            masks.append(np.flatnonzero(logprobs > -np.inf).tolist())
            if self.fault == "wrong kept sets":
                masks[-1] = sorted({*masks[-1], int(table[-1].argmin())})
            if self.says:
                token = self.says.pop(0)
            known = {
                token_id: float(np.float32(logprobs[token_id]))
                for token_id in [token, *params.get("logprob_token_ids", [])]
            }
            if self._in_flight_for_ids and "logprob_token_ids" not in params and params.get("logprobs"):
                known[0] = UNKNOWN_LOGPROB  # vLLM pads the other requests of the step with id 0
            if self.fault == "no logprob":
                known = dict.fromkeys(known, UNKNOWN_LOGPROB)
            entries = [{"token_id": token_id, "logprob": value, "rank": 1} for token_id, value in known.items()]
            self.drawn += 1
            content.append({**entries[0], "top_logprobs": entries[: params.get("logprobs") or 1]})
            versions.append(self.version)
            ids.append(token)
            if token in params.get("stop_token_ids", []):
                break
        self.generated += len(content)
        self._remember(salt, prompt)
        rows = None
        if scored:
            assert of_prompt is not None
            known = [float(np.float32(of_prompt[at][token])) for at, token in enumerate(prompt[1:])]
            rows = [
                None,
                *(
                    {str(token): {"logprob": value, "rank": 1, "decoded_token": ""}}
                    for token, value in zip(prompt[1:], known, strict=True)
                ),
            ]
        return {
            "request_id": "generate-tokens-1",
            "model": "policy",
            "created": 1,
            "usage": {
                "prompt_tokens": len(prompt),
                "total_tokens": len(ids),
                "completion_tokens": len(content),
                "prompt_tokens_details": {
                    "cached_tokens": cached,
                    "created_cache_tokens": None,
                    "multimodal_tokens": None,
                }
                if self.says_cached_tokens
                else None,
                "completion_tokens_details": None,
            },
            "prompt_logprobs": rows,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop" if ids[-1] in params.get("stop_token_ids", []) else "length",
                    "stop_reason": None,
                    "token_ids": ids[len(prompt) :],
                    "routed_experts": None,
                    "sampling_mask": masks
                    if self.facts["returns_kept_sets"] and self.fault != "no kept sets"
                    else None,
                    "weight_versions": spans(versions),
                    "logprobs": {"content": content} if params.get("logprobs") is not None else None,
                }
            ],
        }

    def _logprobs(self, ids: list[int], weights: dict[str, torch.Tensor] | None) -> np.ndarray:
        with torch.inference_mode():
            tokens = torch.tensor([ids])
            if weights is None:
                logits = self._model(tokens).logits
            else:
                logits = torch.func.functional_call(self._model, weights, (tokens,)).logits
            return np.asarray(logits[0].double().log_softmax(-1))

    def _cached(self, salt: str, prompt: list[int]) -> tuple[int, dict[str, torch.Tensor] | None]:
        self.queries += len(prompt)
        for size in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            weights = self._cache.get((salt, np.array(prompt[:size]).tobytes()))
            if weights is not None:
                self.hits += size
                return size, weights
        return 0, None

    def _remember(self, salt: str, prompt: list[int]) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}
        for size in range(BLOCK, len(prompt) + 1, BLOCK):
            self._cache.setdefault((salt, np.array(prompt[:size]).tobytes()), weights)


def processed(logprobs: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Logprobs of the distribution that is drawn from, -inf where an id is cut off: temperature, `min_p`, `top_k`,
    `top_p`, each on what the one before left."""
    scaled = logprobs / (params.get("temperature") or 1.0)
    if params.get("min_p"):
        scaled[scaled < scaled.max() + math.log(params["min_p"])] = -np.inf
    if 0 < params.get("top_k", 0) < len(scaled):
        scaled[scaled < np.sort(scaled)[-params["top_k"]]] = -np.inf
    if params.get("top_p", 1.0) < 1:
        order = np.argsort(scaled)
        mass = np.exp(scaled[order] - scaled.max())
        outside = np.cumsum(mass) <= (1 - params["top_p"]) * mass.sum()
        scaled[order[outside]] = -np.inf
    scaled -= scaled.max()
    found: np.ndarray = scaled - np.log(np.exp(scaled).sum())
    return found


def _unbounded(params: dict[str, Any]) -> str | None:
    """Why a server with --return-sampling-mask takes no such request, in the words of vLLM 0.32."""
    if params.get("temperature", 1.0) <= 0:
        return "sampling distribution replay requires temperature > 0"
    if params.get("top_k", 0) <= 0:
        return (
            "sampling distribution replay requires top_k > 0 to bound sampling mask size, reduce transfer overhead, "
            "and avoid potential OOMs"
        )
    return None


def _with_defaults(params: dict[str, Any]) -> SimpleNamespace:
    """Sampling parameters as vLLM's object has them, as far as the middleware looks at them."""
    defaults = {"logprobs": None, "logprob_token_ids": None, "stop": None, "prompt_logprobs": None, "n": 1}
    return SimpleNamespace(**{name: params.get(name, value) for name, value in defaults.items()})


def _pack(answer: dict[str, Any]) -> None:
    """As the middleware does to a real server's answer."""
    (choice,) = answer["choices"]
    logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    answer["packed"] = packed(choice["token_ids"], logprobs)
    choice["token_ids"] = choice["logprobs"] = None


def spans(versions: list[str]) -> list[dict[str, Any]]:
    """Versions of tokens as vLLM writes them."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": version, "start": at, "end": at + 1})
    return found


@contextlib.asynccontextmanager
async def serving(double: VllmDouble, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Its root while it is served on loopback."""
    runner = web.AppRunner(double.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    assert site._server is not None
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def serving_on_a_thread(double: VllmDouble) -> Iterator[str]:
    """Its root while it is served on loopback, for commands that run event loops of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    served = serving(double)

    def there(call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(HANGS)

    try:
        yield there(served.__aenter__())
    finally:
        there(served.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANGS)


def shape_of(value: Any) -> Any:
    """The keys and types of JSON, for comparing two servers' answers; a list stands for its first item."""
    if isinstance(value, dict):
        if all(key.isdigit() for key in value) and value:
            return {"<id>": shape_of(next(iter(value.values())))}
        return {key: shape_of(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape_of(value[-1])] if value else []
    return type(value).__name__


def as_json(value: Any) -> str:
    """For messages of failed comparisons."""
    return json.dumps(value, indent=1, sort_keys=True, default=str)
