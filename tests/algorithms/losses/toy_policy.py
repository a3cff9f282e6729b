"""A policy so small that every trajectory can be written down: expectations are sums, not samples.

Legend: N trajectories, T tokens of each, K turns of each, C contexts (what stands before a token), V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from verbatim import Trajectory, Turn
from verbatim.algorithms.credit import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.chunk_returns import TURN_REWARDS_SUM
from verbatim.algorithms.losses import Loss, LossInputs

VOCAB = 5
PROMPT = 7
"""What the first prompt is."""


def context_of(said: Sequence[int]) -> int:
    """The number of the context after these tokens: 0 after none."""
    return 1 + VOCAB * (len(said) - 1) + int(said[-1]) if said else 0


class Toy:
    """Every trajectory of turns of these lengths. A token's context is its place and the token before it.

    Each turn earns 0 or 0.5 by all that has been said up to its end; the reward is their sum.
    """

    def __init__(self, turn_lengths: Sequence[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.turn_of = np.repeat(np.arange(len(turn_lengths)), turn_lengths)
        self.num_tokens = len(self.turn_of)
        self.ends = np.cumsum(turn_lengths)
        self.paths = list(itertools.product(range(VOCAB), repeat=self.num_tokens))
        self.contexts_NT = np.array([[context_of(p[:t]) for t in range(self.num_tokens)] for p in self.paths])
        self.ids_NT = np.array(self.paths)
        num_contexts = 1 + VOCAB * (self.num_tokens - 1)
        self.theta = torch.tensor(0.7 * rng.normal(size=(num_contexts, VOCAB)), requires_grad=True)
        self._drift = torch.tensor(rng.normal(size=(num_contexts, VOCAB)))
        turn_rewards = {path[:end]: 0.0 for path in self.paths for end in self.ends}
        self.turn_rewards = {said: 0.5 * rng.integers(2) for said in turn_rewards}
        self.rewards_N = torch.tensor([sum(self.rewards_of(path)) for path in self.paths], dtype=torch.float64)

    def stale(self, drift: float) -> Tensor:
        """The parameters of a policy that sampled some time ago."""
        return self.theta.detach() + drift * self._drift

    def rewards_of(self, path: Sequence[int]) -> list[float]:
        """What each turn earned."""
        return [self.turn_rewards[tuple(path[:end])] for end in self.ends]

    def logprobs(self, theta_CV: Tensor) -> Tensor:
        """Of every token of every trajectory: [N, T]."""
        return theta_CV.log_softmax(-1)[self.contexts_NT, self.ids_NT]

    def exact_gradient(self) -> Tensor:
        """Of the expected reward: [C, V]."""
        expected = (self.logprobs(self.theta).sum(1).exp() * self.rewards_N).sum()
        return torch.autograd.grad(expected, self.theta)[0]

    def trajectory(self, path: Sequence[int], logprobs: Sequence[float], **fields: object) -> Trajectory:
        """The record of one episode; a turn's state is the last token before it, and its place."""
        turns, start = [], 0
        for end, reward in zip(self.ends, self.rewards_of(path), strict=True):
            turns.append(
                Turn(
                    prompt_ids=[PROMPT, *path[:start]],
                    completion_ids=path[start:end],
                    logprobs=logprobs[start:end],
                    reward=reward,
                    state_key=f"{start}: {path[start - 1] if start else None}",
                )
            )
            start = end
        return Trajectory(
            example_id="toy", turns=turns, reward=sum(self.rewards_of(path)), info={TURN_REWARDS_SUM: True}, **fields
        )

    def expected_gradient(
        self,
        loss: Loss,
        advantage: Callable[[AdvantageInputs], AdvantageOutputs],
        theta_mu: Tensor,
        *,
        by_reward: bool = False,
    ) -> Tensor:
        """The mean over all groups of two of the loss' gradient, times the tokens of a trajectory: [C, V].

        Args:
            loss: Its sum over a trajectory's tokens, or its mean over them, is what is differentiated.
            advantage: Of groups of two, the same for both whichever comes first.
            theta_mu: Parameters of the policy that sampled.
            by_reward: The advantage asks the other only for its reward, so one of each reward stands for all.
        """
        mu_NT = self.logprobs(theta_mu)
        chances = mu_NT.sum(1).exp()
        stands_for = [next(j for j, r in enumerate(self.rewards_N) if r == own) for own in self.rewards_N]
        others: dict[int, float] = {}
        for j, chance in enumerate(chances.tolist()):
            other = stands_for[j] if by_reward else j
            others[other] = others.get(other, 0.0) + chance
        records = [self.trajectory(path, [-1.0] * self.num_tokens) for path in self.paths]
        own, weights, advantages = [], [], []
        for i, j in itertools.product(range(len(records)), others):
            credit = advantage(AdvantageInputs(rollouts=[records[i], records[j]])).advantages[0]
            own.append(i)
            weights.append(chances[i].item() * others[j])
            advantages.append(np.broadcast_to(credit, len(self.ends))[self.turn_of])
        leaf_PT = self.logprobs(self.theta).detach()[own].requires_grad_()
        grad_PT = self._slopes(loss, leaf_PT, mu_NT[own], torch.tensor(np.array(advantages)))
        weighed = (torch.tensor(weights, dtype=torch.float64)[:, None] * grad_PT * self.logprobs(self.theta)[own]).sum()
        (gradient,) = torch.autograd.grad(weighed, self.theta)
        return gradient * (self.num_tokens if loss.normalizer == "trajectories" else 1)

    def _slopes(self, loss: Loss, trainer_PT: Tensor, inference_PT: Tensor, advantages_PT: Tensor) -> Tensor:
        """dL/dlogprob of each token, each trajectory by itself where the loss sees it whole."""
        chunks_T = torch.tensor(self.turn_of)
        rows = [slice(None)] if loss.level == "token" else [slice(p, p + 1) for p in range(len(trainer_PT))]
        total = sum(
            loss(
                LossInputs(
                    trainer_PT[at].flatten(),
                    inference_PT[at].flatten(),
                    None,
                    advantages_PT[at].flatten(),
                    torch.ones_like(trainer_PT[at].flatten(), dtype=torch.bool),
                    chunks_T.repeat(len(trainer_PT[at])),
                )
            ).loss
            for at in rows
        )
        return torch.autograd.grad(total, trainer_PT)[0]
