"""Turns a data set and a reward function into an environment whose episodes are a prompt, one answer and its reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.errors import EnvironmentFault, UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Episode, Score
from verbatim.environments.reward_functions import Rewards
from verbatim.environments.rows import read_splits


class SingleTurn:
    """An environment of single-turn episodes. The prompt of each row gets one answer, which a reward function scores.

    Args:
        data: Rows `[{"prompt": "2 + 2?", "answer": "4"}]`, a JSONL file, a Hugging Face data set (a name, a folder, a
            `datasets.Dataset`), or a table `{path, name, split, revision}` that names a data set.
        reward: A function or its import path, or a list of these, whose values are summed. `def exact(completion,
            answer, **columns) -> float` is called with the sampled text and, by name, the row's fields. TRL's
            `def exact(completions, answer, **columns) -> list[float]` is called with lists of length one. Async
            functions run on the event loop, others in a thread. The value is None if a judge gives the reward.
        prompt: The field with the prompt, which is a string or messages. A row without it is opened by its `messages`.
        system_prompt: A system message in front of the prompt.
        eval_data: Held-out rows. By default every tenth row of `data` is held out if there are at least 20 rows.
        eval_share: The share of `data` to hold out. With 0, evaluation uses the training rows.
        weights: One weight for each reward function.

    Raises:
        UsageError: the data cannot be read, or has no prompts.
        ComponentError: a reward function cannot be used with this data.

    Example:
        >>> def exact(completion, answer):
        ...     return float(completion.strip() == answer)
        >>> environment = SingleTurn([{"prompt": "2 + 2?", "answer": "4"}], exact)
        >>> environment.examples("train")[0].messages
        ({'role': 'user', 'content': '2 + 2?'},)
    """

    def __init__(
        self,
        data: Any,
        reward: Any = None,
        *,
        prompt: str = "prompt",
        system_prompt: str | None = None,
        eval_data: Any = None,
        eval_share: float = 0.1,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._rewards = Rewards.of(reward, weights)
        self._system_prompt, self._prompt = system_prompt, prompt
        self._examples = read_splits(data, eval_data, prompt=prompt, eval_share=eval_share)
        for what, rows in (("data", self._examples["train"]), ("eval_data", self._examples["eval"])):
            if not rows[0].messages:
                raise UsageError(
                    f"{what}: rows have no field {prompt!r} and no messages; they have "
                    f"{', '.join(rows[0].payload) or 'no other field'}; name the one that holds the "
                    'prompt: prompt = "question"'
                )
        self._rewards.check(self._examples["train"][0].payload)

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows of the split "train" or "eval" as examples."""
        return self._examples[split]

    async def start(self, example: Example, seed: int) -> Episode:
        """Start an episode for one row."""
        return _SingleTurnEpisode(self._rewards, example, self._system_prompt, self._prompt)


class _SingleTurnEpisode(Episode):
    def __init__(self, rewards: Rewards, example: Example, system_prompt: str | None, prompt: str) -> None:
        self._rewards, self._example, self._prompt = rewards, example, prompt
        self.messages = [*opened_with(system_prompt), *example.messages]

    async def score(self, trajectory: Trajectory) -> Score:
        if not self._rewards.functions:
            raise EnvironmentFault(
                'SingleTurn has no reward; give it one, reward = "my_rewards.exact", or let a judge '
                'score: id = "judged"'
            )
        prompt = prompt_of(self._example, self._prompt)
        return await self._rewards.score(trajectory, self._example, prompt, num_opening=len(self.messages))


def prompt_of(example: Example, field: str) -> Any:
    """Return the prompt in the row's own form, a string or messages, because reward functions receive it unchanged."""
    value = example.payload.get(field)
    return value if isinstance(value, str) else list(example.messages)


def opened_with(system_prompt: str | None) -> list[Message]:
    """Return the opening messages that come before the prompt: the system message, or no message."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
