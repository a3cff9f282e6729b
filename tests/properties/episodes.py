"""Random batches whose agents do to their history whatever agents do: extend it, strip it, compact it, start again."""

import math
from random import Random

import numpy as np
from hypothesis import strategies as st

from trainer.trainer_helpers import VOCAB
from verbatim import Trajectory, Turn

ALPHABET = (0, 1, 2, VOCAB - 1)
"""Few ids, so that unrelated sequences have prefixes in common; both ends of the vocabulary are among them."""
SYSTEM = (3, 4, 5, 6, 7, 8)
"""How a first prompt begins."""
AGENTS = ("main", "main", "sub/1", "sub/2")
MOVES = ("extend", "extend", "extend", "strip", "compact", "restart", "again", "cut", "borrow")
TEMPERATURES = (1.0, 1.0, 0.5, 1.25)
MAX_LENGTH = 100
"""Most tokens of a prompt and its completion."""

Blocks = list[tuple[bool, tuple[int, ...]]]
"""A conversation: what was sent (False) and what was sampled (True), piece by piece."""


limits = st.one_of(st.integers(1, 120), st.just(10_000))
"""Tokens of a micro-batch: from one to everything."""


def batches() -> st.SearchStrategy[list[Trajectory]]:
    """`random_batch` with every decision made, and made smaller, by hypothesis."""
    return st.builds(random_batch, st.randoms(use_true_random=False))


def random_batch(random: Random) -> list[Trajectory]:
    """One or two groups of one to three trajectories.

    The first turn of all is an ordinary one: several different ids, something sampled, an advantage if there are any.
    Where every context of a batch is one id repeated, the gradient of some weights is 0 but for rounding, and there is
    nothing to compare.
    """
    numbers = np.random.default_rng(random.getrandbits(32))
    learns = random.random() < 0.9
    batch = []
    for group in range(random.randint(1, 2)):
        opening = SYSTEM + _ids(random, 0, 3)
        for index in range(random.randint(1, 3)):
            turns = _turns(random, numbers, opening, learns, ordinary=not batch)
            advantage = random.choice((None, 0.0, _number(numbers), _number(numbers))) if learns else 0.0
            batch.append(
                Trajectory(
                    example_id="x",
                    turns=turns,
                    advantage=advantage,
                    trajectory_id=f"{group}/{index}",
                    group_id=f"{group}",
                    sample_index=index,
                )
            )
    return batch


def _turns(
    random: Random, numbers: np.random.Generator, opening: tuple[int, ...], learns: bool, *, ordinary: bool
) -> list[Turn]:
    conversations: dict[str, Blocks] = {}
    turns = []
    for _ in range(random.randint(1, 8)):
        agent = random.choice(AGENTS) if turns or not ordinary else "main"
        blocks = _next_prompt(random, conversations, agent, opening)
        completion = _ids(random, 0, 4)
        if ordinary and not turns:
            completion = (9, *completion, 10)
        if sum(len(ids) for _, ids in blocks) + len(completion) > MAX_LENGTH:
            break
        turns.append(_turn(random, numbers, agent, blocks, completion, learns, ordinary=ordinary and not turns))
        conversations[agent] = [*blocks, (True, completion)]
    return turns


def _next_prompt(random: Random, conversations: dict[str, Blocks], agent: str, opening: tuple[int, ...]) -> Blocks:
    """What an agent is asked next, as pieces."""
    blocks = conversations.get(agent)
    if blocks is None:  # a sub-agent may begin with what its parent knows
        parent = [*conversations.values()][-1] if conversations and random.random() < 0.3 else []
        return [*parent, (False, opening if agent == "main" else _ids(random, 1, 3))]
    said = (False, _ids(random, 0, 3))
    move = random.choice(MOVES)
    if move == "extend":
        return [*blocks, said]
    if move == "strip":  # the first half of what was sampled was thinking
        return [(sampled, ids[len(ids) // 2 :] if sampled else ids) for sampled, ids in blocks] + [said]
    if move == "compact":
        return [(False, opening), (False, _ids(random, 1, 2))]
    if move == "restart":
        return [(False, _ids(random, 1, 2))]
    if move == "again":
        return blocks[:-1]
    if move == "cut":  # inside the last completion, where that is longer than one id
        return [*blocks[:-1], (True, blocks[-1][1][:-1])]
    return [*conversations[random.choice(sorted(conversations))], said]


def _turn(
    random: Random,
    numbers: np.random.Generator,
    agent: str,
    blocks: Blocks,
    completion: tuple[int, ...],
    learns: bool,
    *,
    ordinary: bool,
) -> Turn:
    count = len(completion)
    kinds = (_number(numbers),) if ordinary else (None, None, 0.0, _number(numbers))
    return Turn(
        prompt_ids=[i for _, ids in blocks for i in ids],
        completion_ids=completion,
        logprobs=_logprobs(numbers, count) if ordinary or random.random() < 0.85 else None,
        policy_versions=[random.randint(0, 3)] * count if random.random() < 0.5 else None,
        temperature=random.choice(TEMPERATURES),
        advantage=random.choice(kinds) if learns else 0.0,
        agent=agent,
    )


def _ids(random: Random, least: int, most: int) -> tuple[int, ...]:
    return tuple(random.choice(ALPHABET) for _ in range(random.randint(least, most)))


def _number(numbers: np.random.Generator) -> float:
    """An advantage that float32 holds exactly, as samples do."""
    return float(np.float32(numbers.choice([-1, 1]) * numbers.uniform(0.5, 1.5)))


def _logprobs(numbers: np.random.Generator, count: int) -> np.ndarray:
    """Near the model's, or so far above or below them that the loss masks the token or clamps its ratio."""
    near = -math.log(VOCAB) + 0.3 * numbers.standard_normal(count)
    far = np.where(numbers.random(count) < 0.5, numbers.uniform(-1, -0.1, count), numbers.uniform(-8, -7, count))
    return np.where(numbers.random(count) < 0.8, near, far).astype(np.float32)
