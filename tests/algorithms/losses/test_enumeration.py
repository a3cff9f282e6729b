"""What each estimator gives on average, summed over every group of two that a toy policy can produce.

Tokens per trajectory are a constant of the toy, so the trainer's division by tokens is left out on both sides. Means
are compared with the exact gradient of the expected reward: how much of it they are (`scale`), and the norm of what
else is in them, over its own (`rest`). The tables of benchmarks/notes/losses.md are these.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.losses.toy_policy import PROMPT, VOCAB, Toy, context_of
from verbatim import Group, build_samples
from verbatim.algorithms.credit import ADVANTAGES, assign_advantages
from verbatim.algorithms.losses import LOSSES, LossInputs

DOCS = (Path(__file__).parents[3] / "benchmarks" / "notes" / "losses.md").read_text(encoding="utf-8")
DRIFT = 0.3
"""How far the policy has moved since it sampled, in the second table."""

CREDIT = {
    "`rloo`": ADVANTAGES["rloo"],
    "`default`": ADVANTAGES["default"],
    "`normalized`": ADVANTAGES["normalized"],
    "`chunk_returns`, `gamma = 1`": partial(ADVANTAGES["chunk_returns"], gamma=1.0),
    "`chunk_returns`": ADVANTAGES["chunk_returns"],
    '`chunk_returns`, `baseline = "group"`': partial(ADVANTAGES["chunk_returns"], baseline="group"),
    "`gigpo`": ADVANTAGES["gigpo"],
    '`gigpo`, `scale = "none"`': partial(ADVANTAGES["gigpo"], scale="none"),
}

UNMASKED = {"dppo_mask_low": 1.0, "dppo_mask_high": 1.0, "delta": float("inf"), "kl_tau": 0.0}
STALE = {
    "`default`": LOSSES["default"],
    "`default` without mask, clamp and KL term": replace(LOSSES["default"], parameters=UNMASKED),
    "`ppo`": LOSSES["ppo"],
    "`gspo`": LOSSES["gspo"],
    "`gspo`, `eps_low = 0.2`, `eps_high = 0.28`": replace(
        LOSSES["gspo"], parameters={"eps_low": 0.2, "eps_high": 0.28}
    ),
    "`cispo`": LOSSES["cispo"],
    "`tis`": LOSSES["tis"],
    "`ipa`": LOSSES["ipa"],
}


@cache
def three_turns():
    return Toy((1, 1, 1))


@cache
def longer_turns():
    """One turn has two tokens, so that the ratio of a chunk is not that of a token."""
    return Toy((2, 1, 1))


@cache
def on_policy(name):
    toy = three_turns()
    return toy.expected_gradient(LOSSES["default"], CREDIT[name], toy.theta.detach())


@cache
def off_policy(name):
    toy = longer_turns()
    return toy.expected_gradient(STALE[name], ADVANTAGES["rloo"], toy.stale(DRIFT), by_reward=True)


def bias(gradient, exact):
    """The scale, and the norm of the rest; losses are minimised."""
    scale = -((gradient * exact).sum() / exact.square().sum()).item()
    return scale, ((gradient + scale * exact).norm() / exact.norm()).item()


# ---- on-policy


def test_rloo_is_unbiased():
    assert (on_policy("`rloo`") + three_turns().exact_gradient()).abs().max() < 1e-10


def test_default_is_half_of_it_in_groups_of_two():
    assert (on_policy("`default`") + three_turns().exact_gradient() / 2).abs().max() < 1e-10


def test_undiscounted_chunk_returns_are_unbiased():
    assert (on_policy("`chunk_returns`, `gamma = 1`") + three_turns().exact_gradient()).abs().max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("opd", "sft")])
def test_on_policy_every_loss_is_unbiased(name):
    toy = longer_turns()
    found = toy.expected_gradient(LOSSES[name], ADVANTAGES["rloo"], toy.theta.detach(), by_reward=True)
    assert (found + toy.exact_gradient()).abs().max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", CREDIT)
def test_the_bias_of_each_advantage_is_the_one_in_the_documentation(name):
    scale, rest = bias(on_policy(name), three_turns().exact_gradient())
    assert f"| {name} | {scale:.3f} | {rest:.3f} |" in DOCS


# ---- with a stale policy


@pytest.mark.slow
@pytest.mark.parametrize("name", STALE)
def test_the_bias_of_each_loss_is_the_one_in_the_documentation(name):
    scale, rest = bias(off_policy(name), longer_turns().exact_gradient())
    assert f"| {name} | {scale:.3f} | {rest:.3f} |" in DOCS


def test_the_policy_is_as_stale_as_the_documentation_says():
    toy = longer_turns()
    mu, pi = toy.logprobs(toy.stale(DRIFT)), toy.logprobs(toy.theta.detach())
    divergence = (mu.sum(1).exp() * (mu - pi).sum(1)).sum() / toy.num_tokens
    assert f"a KL divergence of {divergence:.2f}\nper token" in DOCS


@cache
def sampled_groups(count=1200, seed=5):
    """Groups of two that a stale policy sampled token by token, as records with credit."""
    toy, rng, groups = longer_turns(), np.random.default_rng(seed), []
    log_mu_CV = toy.stale(DRIFT).log_softmax(-1).numpy()
    for number in range(count):
        pair = []
        for index in range(2):
            said, logprobs = (), []
            for _ in range(toy.num_tokens):
                row = log_mu_CV[context_of(said)]
                token = int(rng.choice(VOCAB, p=np.exp(row)))
                said, logprobs = (*said, token), [*logprobs, row[token]]
            pair.append(toy.trajectory(said, logprobs, trajectory_id=f"{number}/{index}", sample_index=index))
        group = Group(group_id=str(number), example_id="toy", env="toy", trajectories=tuple(pair))
        groups.append(assign_advantages(group, ADVANTAGES["rloo"]))
    return groups


@cache
def built_samples():
    """For each trajectory of each sampled group: its training sample, the positions of the trained tokens, and their
    contexts."""
    groups = []
    for group in sampled_groups():
        found = []
        for trajectory in group.trajectories:
            (sample,) = build_samples(trajectory)
            assert sample.token_ids[0] == PROMPT
            places = np.flatnonzero(sample.loss_mask)
            found.append((sample, places, [context_of(sample.token_ids[1:at].tolist()) for at in places]))
        groups.append(found)
    return groups


def gradient_of(sample, places, contexts, loss, log_pi_CV):
    """The gradient of a recorded trajectory, by way of its training sample: [C, V]."""
    ids = sample.token_ids[places]
    leaf = torch.tensor(log_pi_CV[contexts, ids], requires_grad=True)
    inputs = LossInputs(
        leaf,
        torch.tensor(sample.logprobs[places]).double(),
        None,
        torch.tensor(sample.advantages[places]).double(),
        torch.ones(len(places), dtype=torch.bool),
        torch.tensor(sample.chunk_ids[places]),
    )
    (slopes,) = torch.autograd.grad(loss(inputs).loss, leaf)
    gradient = np.zeros(log_pi_CV.shape)
    for context, token, slope in zip(contexts, ids, slopes.tolist(), strict=True):
        gradient[context] -= slope * np.exp(log_pi_CV[context])
        gradient[context, token] += slope
    return gradient * (len(places) if loss.normalizer == "trajectories" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["`default`", "`tis`", "`ppo`", "`gspo`", "`ipa`"])
def test_the_mean_of_sampled_groups_is_the_enumerated_one(name):
    toy = longer_turns()
    log_pi_CV = toy.theta.detach().log_softmax(-1).numpy()
    found = np.array(
        [np.mean([gradient_of(*built, STALE[name], log_pi_CV) for built in group], axis=0) for group in built_samples()]
    )
    error = found.std(axis=0, ddof=1) / len(found) ** 0.5
    away = np.abs(found.mean(axis=0) - off_policy(name).numpy())
    assert (away <= 4 * error).all()
    assert np.linalg.norm(off_policy(name).numpy()) > 30 * error.mean()  # there is something to agree on
