"""Finds the routers of a mixture-of-experts model, so that a forward pass can observe or replace their choices.

A router computes a logit per token and expert, picks the K largest with `topk`, and turns their values into weights.
To replay recorded experts, that `topk` is made to return the recorded indices with the router's own values for them.
The model's code then still computes the weights from its own logits, so the weights keep their gradient.

Legend: T tokens of a forward pass, L layers with a router, E experts, K experts of a token, D decoder layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verbatim.core.errors import ModelError
from verbatim.core.records.experts import Routing
from verbatim.models.refusal import refusing
from verbatim.models.tiny import NoTinyCopy, decoder_layers, tiny_copy

logger = logging.getLogger(__name__)

Observer = Callable[[int, slice, Tensor, Tensor, Tensor], Tensor]
"""`observe(router, tokens, logits_TE, weights_TK, experts_TK) -> weights_TK`: called with a router's results for some
tokens of the pass; the returned weights replace the router's. `router` counts from 0."""


@dataclass(frozen=True, eq=False)
class Choices:
    """Recorded experts that a forward pass uses instead of the experts that its routers would choose."""

    experts_TDK: Tensor
    """Expert indices, integers [T, D, K], for all decoder layers including those without a router."""
    known_T: Tensor
    """Tokens that have recorded experts, bool [T]. For the other tokens the routers choose."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterPass:
    """What one forward pass does at the routers: replay recorded experts, observe the routers' choices, or both."""

    choices: Choices | None = None
    observe: Observer | None = None
    tokens: slice = field(default_factory=lambda: slice(None))
    """The range of the micro-batch's tokens that the pass computes, if each row has a forward pass of its own."""

    def of(self, start: int, stop: int) -> RouterPass:
        """The router pass for a forward pass of only the tokens `start` to `stop`."""
        choices = self.choices
        if choices is not None:
            choices = Choices(choices.experts_TDK[start:stop], choices.known_T[start:stop])
        return replace(self, choices=choices, tokens=slice(start, stop))


_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
)
"""Names that model configurations use for K."""


class Routers:
    """The routers of a model. Its forward passes are unchanged except inside `during`.

    Args:
        model: A `transformers` model. The `forward` of each router is wrapped in place.
        modules: Its routers, in the order of the layers.
    """

    def __init__(self, model: Any, modules: Sequence[nn.Module]) -> None:
        self.name = type(model).__name__
        self.num_layers = len(decoder_layers(model))
        """D."""
        self.layers = _layers(model, modules)
        """The decoder layer of each router."""
        # A router's routing matrix, [E, width], is its largest parameter. LoRA factors do not belong to the router
        # itself.
        own = [tuple(p.shape) for name, p in modules[0].named_parameters() if p.ndim == 2 and "lora_" not in name]
        self.num_experts = max(own, key=_size)[0]
        """E."""
        text_config = model.config.get_text_config()
        self.routing = Routing(
            num_layers=self.num_layers, num_experts=self.num_experts, experts_per_token=_experts_per_token(text_config)
        )
        """The shape that recorded experts must have."""
        self.limits_groups = _limits_groups(text_config)
        """True if experts outside the groups that a router chooses get weight 0, which rules out replay."""
        self._now: RouterPass | None = None
        for number, module in enumerate(modules):
            module.forward = partial(self._forward, number, module.forward)

    @contextmanager
    def during(self, router_pass: RouterPass | None) -> Iterator[None]:
        """Apply a router pass to the forward passes inside the block. With None, these are ordinary passes."""
        before, self._now = self._now, router_pass
        try:
            yield
        finally:
            self._now = before

    def recomputed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The two contexts of activation checkpointing: the forward pass, and its recomputation in the backward pass.

        The recomputation runs after `during` has ended, so its context applies the router pass again; otherwise other
        experts could be chosen.
        """
        return nullcontext(), self.during(self._now)

    def _forward(self, number: int, forward: Callable[..., tuple[Tensor, ...]], *args: Any, **kwargs: Any) -> Any:
        now = self._now
        if now is None:
            return forward(*args, **kwargs)
        with nullcontext() if now.choices is None else self._chosen(number, now.choices):
            logits_TE, weights_TK, experts_TK, *rest = forward(*args, **kwargs)
        if now.observe is not None:
            weights_TK = now.observe(number, now.tokens, logits_TE, weights_TK, experts_TK)
        return (logits_TE, weights_TK, experts_TK, *rest)

    @contextmanager
    def _chosen(self, number: int, choices: Choices) -> Iterator[None]:
        experts_TK = choices.experts_TDK[:, self.layers[number]].long()
        mode = _Choose(experts_TK, choices.known_T, self.num_experts)
        with mode:
            yield
        if not mode.has_chosen:  # without this error, replay would silently do nothing
            raise ModelError(
                f"{self.name} does not choose {experts_TK.shape[1]} of {self.num_experts} experts by "
                "topk, so recorded experts cannot be replayed in it"
            )


def _layers(model: Any, modules: Sequence[nn.Module]) -> tuple[int, ...]:
    place = {part: at for at, layer in enumerate(decoder_layers(model)) for part in layer.modules()}
    return tuple(place.get(module, -1) for module in modules)


def _experts_per_token(config: Any) -> int | None:
    given = (getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)
    return next((number for number in given if isinstance(number, int) and number > 0), None)


def _limits_groups(config: Any) -> bool:
    """True for DeepSeek-V2's routing, which computes the weights from scores that are 0 outside the chosen groups.
    Later DeepSeek models also choose by such masked scores, but compute the weights from the unmasked scores."""
    limited = getattr(config, "topk_method", None) == "group_limited_greedy"
    return bool(limited and (config.topk_group or 0) < (config.n_group or 0))


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1]


class _Choose(TorchFunctionMode):
    """Replaces the result of a `topk` over all experts. A `topk` over groups has another shape and is left alone."""

    def __init__(self, experts_TK: Tensor, known_T: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_TK, self._known_T, self._num_experts = experts_TK, known_T, num_experts
        self.has_chosen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:  # models use both spellings
            return found
        scores_TE: Tensor = args[0]
        if scores_TE.shape[-1] != self._num_experts or found.indices.shape != self._experts_TK.shape:
            return found
        self.has_chosen = True
        indices_TK = torch.where(self._known_T[:, None], self._experts_TK, found.indices)
        return torch.return_types.topk((scores_TE.gather(-1, indices_TK), indices_TK))


def find_routers(model: Any) -> Routers | None:
    """Find the routers of a mixture of experts. Returns None for a dense model, and for routers of an unsupported kind.

    A router is supported if it is the only one in its decoder layer, is a module separate from the experts, and returns
    its logits as its first output.
    """
    modules = router_modules(model)
    layers = _layers(model, modules)
    return Routers(model, modules) if layers and -1 not in layers and len(set(layers)) == len(layers) else None


def check_replay(model_config: Any) -> Routing:
    """Refuse a model whose experts cannot be recorded or replayed, before the run starts.

    No weights are needed: replay is tried on a small copy.

    Args:
        model_config: The model's `transformers` configuration.

    Returns:
        The shape that recorded experts must have.

    Raises:
        ModelError: the model has no supported routers, cannot replay experts, or cannot be built.
    """
    from transformers import AutoModelForCausalLM

    with refusing(f"a model of {type(model_config).__name__} cannot be built"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    routers = find_routers(model)
    if routers is None:
        raise ModelError(f"inference.return_routed_experts = true, but {why_no_routers(model)}; remove this setting")
    refuse_limited_groups(routers)
    _try_replay(model)
    return routers.routing


def refuse_limited_groups(routers: Routers) -> None:
    """Refuse a model that can only replay experts of the groups that its routers themselves choose.

    Raises:
        ModelError: the model is of this kind.
    """
    if routers.limits_groups:
        raise ModelError(
            f"recorded experts cannot be replayed in {routers.name} with topk_method = "
            '"group_limited_greedy": experts outside of the groups that its routers choose themselves '
            "have the weight 0; set inference.return_routed_experts = false"
        )


@torch.no_grad()
def _try_replay(model: Any) -> None:
    """Replay experts in a small copy of the model.

    Raises:
        ModelError: the model's routers do not follow the recorded experts.
    """
    try:
        tiny = tiny_copy(model)
    except NoTinyCopy as error:
        logger.warning("replay of recorded experts could not be checked before the first batch: %s", error)
        return
    routers = find_routers(tiny)
    assert routers is not None
    each = routers.routing.experts_per_token
    if each is None:
        return
    device = next(tiny.parameters()).device
    experts_1DK = torch.arange(each, device=device).expand(1, routers.num_layers, each)
    with routers.during(RouterPass(choices=Choices(experts_1DK, torch.ones(1, dtype=torch.bool, device=device)))):
        tiny(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)


def why_no_routers(model: Any) -> str:
    """Why `find_routers` finds none in this model: a clause that names its class."""
    import transformers

    name, version = type(model).__name__, transformers.__version__
    if not any(path.rpartition(".")[2] == "experts" for path, _ in model.named_modules()):
        return f"the decoder layers of {name} have no routed experts"
    if _recorded(model):
        return f"the routers of {name} are of a kind that Verbatim cannot observe"
    is_older = tuple(map(int, version.split(".")[:2])) < DECLARED_SINCE
    later = f" ({'.'.join(map(str, DECLARED_SINCE))} and later do)" if is_older else ""
    return f"transformers {version} does not say which modules of {name} are its routers{later}"


DECLARED_SINCE = (5, 19)
"""The release of `transformers` since which nearly all of its models with experts say which modules are their routers.
26 types do not with 5.17."""


def _recorded(model: Any) -> list[Any]:
    """What `transformers` says of the model's routers. A class without an index is that of a layer around a router,
    as of EXAONE-MoE and Llama 4 before 5.19."""
    kinds: list[Any] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits") or []
        kinds += recorded if isinstance(recorded, list) else [recorded]
    return [kind for kind in kinds if not isinstance(kind, type)]


def router_modules(model: Any) -> list[nn.Module]:
    """The modules whose first output `transformers` records as router logits, in the order of the layers."""
    kinds = _recorded(model)
    if any(kind.index != 0 for kind in kinds):
        return []
    classes = tuple({kind.target_class for kind in kinds})
    return [module for module in model.modules() if isinstance(module, classes)]
