"""Lists names of losses and advantages from TRL, verl, ROLL, slime and prime-rl with their counterparts here.

Other frameworks name an algorithm as a whole; here an algorithm consists of a loss and an advantage.
"""

from __future__ import annotations

import re

_GRPO = 'type = "ppo" under [trainer.loss] and type = "normalized" under [orchestrator.advantage]'
_DR_GRPO = 'type = "ppo" (or "default") under [trainer.loss] and type = "default" under [orchestrator.advantage]'
_DAPO = (
    f"{_GRPO}; its wider upper bound is eps_high = 0.28, the default, and its dynamic sampling is "
    "orchestrator.buffer.online_difficulty_filtering = true"
)
_RLOO = 'type = "tis" (or "ppo") under [trainer.loss] and type = "rloo" under [orchestrator.advantage]'
_REINFORCE = (
    'type = "tis" under [trainer.loss] (the policy gradient, with a bound on the importance weight) and '
    'type = "default" (minus the group\'s mean) or "rloo" under [orchestrator.advantage]'
)
_IPA = 'type = "ipa" under [trainer.loss] and type = "chunk_returns" under [orchestrator.advantage]'
_NO_CRITIC = (
    'there is no value model here; use type = "chunk_returns" under [orchestrator.advantage] for credit to each '
    'turn, or "normalized" for the group\'s own baseline'
)
_GIGPO = 'type = "ppo" under [trainer.loss] and type = "gigpo" under [orchestrator.advantage]'

_ANSWERS = {
    "grpo": _GRPO, "vanilla_grpo": _GRPO, "bnpo": _GRPO, "grpo_passk": _GRPO, "normalised": _GRPO,
    "dr_grpo": _DR_GRPO, "drgrpo": _DR_GRPO, "dapo": _DAPO, "clip_higher": _DAPO,
    "rloo": _RLOO, "reinforce": _REINFORCE, "vanilla": _REINFORCE, "pg": _REINFORCE, "policy_gradient": _REINFORCE,
    "policy_loss": _GRPO, "reinforce_plus_plus": _REINFORCE, "reinforce_plus_plus_baseline": _REINFORCE,
    "gpg": _REINFORCE, "opo": _REINFORCE, "remax": _REINFORCE, "aipo": _REINFORCE, "impala": _REINFORCE,
    "vtrace": _REINFORCE, "ipa_chunk": _IPA, "step_reinforce": _IPA, "chunk_returns": _IPA, "gae": _NO_CRITIC,
    "gigpo": _GIGPO, "normalized": _GRPO, "dppo": 'type = "default" under [trainer.loss]',
    "token": 'type = "default" under [trainer.loss]', "sequence": 'type = "gspo" under [trainer.loss]',
    "gspo_token": 'type = "gspo" under [trainer.loss]', "sft_loss": "orchestrator.training_mode, or `verbatim sft`",
    "ppo_clip": 'type = "ppo" under [trainer.loss]',
    "dual_clip": 'type = "ppo" with dual_clip = 3.0 under [trainer.loss]',
    "opd": 'orchestrator.training_mode = "opd"', "distillation": 'orchestrator.training_mode = "opd"',
    "kl_distill": 'orchestrator.training_mode = "opd"', "gkd": 'orchestrator.training_mode = "opd"',
}  # fmt: skip


def known_elsewhere(what: str, name: str) -> str | None:
    """What to type instead of a name from another framework, or None for any other name.

    Args:
        what: The kind of component: "loss" or "advantage".
        name: The name as typed; case, hyphens, "+" and a trailing "_loss" or "_advantage" are ignored.

    Example:
        >>> known_elsewhere("loss", "GRPO")
        'type = "ppo" under [trainer.loss] and type = "normalized" under [orchestrator.advantage]'
    """
    if what not in ("loss", "advantage"):
        return None
    plain = re.sub(r"[-\s.]+", "_", name.strip().lower().replace("++", "_plus_plus")).strip("_")
    short = re.sub(r"_(loss|advantage|adv)$", "", plain)
    return _ANSWERS.get(plain) or _ANSWERS.get(short)
