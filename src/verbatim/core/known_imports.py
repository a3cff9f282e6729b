"""Lists names imported from modules of prime-rl, twinkle and ROLL, with their counterparts here, for error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _same(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_DATA = {
    **_same("verbatim", "Message", "ToolCall", "Trajectory"),
    "InputFeature": "verbatim:TrainingSample",
    "Tool": "a tool's schema is a plain dict in OpenAI's format",
}
_ENGINES = _same("verbatim.rollouts", "Rollout", "MultiTurnRollout", "APIMultiTurnRollout")
_TOOLS = _same("verbatim.environments", "Tool", "ToolManager")
_FORMULATE = 'orchestrator.formulate_mode = "traj" or "step"'

IMPORTS: Mapping[str, Mapping[str, str]] = {
    "prime_rl.trainer.rl.loss": _same("verbatim.algorithms", "LossInputs", "LossOutputs"),
    "prime_rl.orchestrator.advantage": _same("verbatim.algorithms", "AdvantageInputs", "AdvantageOutputs"),
    "twinkle": {"remote_class": "the engines have it: MultiTurnRollout.remote(...) makes a Ray actor"},
    "twinkle.data_format": _DATA,
    "twinkle.data_format.message": {name: _DATA[name] for name in ("Message", "ToolCall", "Tool")},
    "twinkle.data_format.sampling": _same("verbatim.inference", "SamplingParams"),
    "twinkle.template": {"Template": "verbatim.models.renderers:create_renderer"},
    "twinkle.sampler": {
        "TorchSampler": "verbatim.inference.embedded.engine:TorchSampler",
        "vLLMSampler": "verbatim.inference.http.sampler:HttpSampler",
    },
    "twinkle_agentic.rollout": _ENGINES,
    "twinkle_agentic.rollout.base": {"Rollout": _ENGINES["Rollout"]},
    "twinkle_agentic.rollout.multi_turn": {"MultiTurnRollout": _ENGINES["MultiTurnRollout"]},
    "twinkle_agentic.rollout.api_multi_turn": {"APIMultiTurnRollout": _ENGINES["APIMultiTurnRollout"]},
    "twinkle_agentic.tools": _TOOLS,
    "twinkle_agentic.tools.base": {"Tool": _TOOLS["Tool"]},
    "twinkle_agentic.tools.tool_manager": {"ToolManager": _TOOLS["ToolManager"]},
    "twinkle_agentic.protocol.base": {"API": "a server behind another protocol needs a proxy that speaks OpenAI's"},
    "twinkle_agentic.protocol.openai": _same("verbatim.inference.openai", "OpenAI"),
    "roll.pipeline.agentic.env_manager.agent_native_env_manager": {"AgentNativeStepEnvManager": _FORMULATE},
    "roll.pipeline.agentic.utils": {"compute_discounted_returns": "verbatim.algorithms.credit:chunk_returns_advantage"},
    "roll.utils.functionals": {"compute_segment_masked_mean": "verbatim.algorithms.losses:ipa_loss"},
}  # fmt: skip
"""Maps module and name to our `module:name`, or to a sentence if there is no counterpart to import."""


def ours_for(statement: str) -> str | None:
    """What to write instead of an import of another framework, or None for any other statement.

    >>> ours_for("from prime_rl.trainer.rl.loss import LossInputs")
    'here: from verbatim.algorithms import LossInputs'
    >>> ours_for("import numpy")
    """
    found = re.match(r"\s*(?:from|import)\s+([\w.]+)(?:\s+import\s+(.*))?", statement)
    module = found[1] if found else ""
    known = IMPORTS.get(module) or IMPORTS.get(module.rpartition(".")[0])
    if known is None:
        top = module.partition(".")[0]
        of_package = [name for name in IMPORTS if name.partition(".")[0] == top]
        return f"counterparts exist for {', '.join(of_package)}: docs/coming_from.md" if of_package else None
    imported = re.findall(r"\w+", module.rpartition(".")[2] + " " + ((found and found[2]) or ""))
    return "here: " + "; ".join(
        f"{name} is {ours}" if " " in ours else _import(ours, name)
        for name, ours in known.items()
        if name in imported or not known.keys() & set(imported)
    )


def _import(ours: str, name: str) -> str:
    module, _, own = ours.partition(":")
    return f"from {module} import {own}" + (f" as {name}" if own != name else "")
