"""Every reason for which a token is not trained is reached in a run, and the ledger adds up in all of them."""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, say
from run.orchestrator.loop_runs import GROUP, GROUPS, Coin, Coins, GatedTrainer, make, tokens_by_outcome, until
from verbatim.core.errors import RecordError, RunStopped
from verbatim.core.records.experts import Routing
from verbatim.core.trajectories.ledger import REASONS
from verbatim.inference.scripted import ScriptedSampler

BATCH = GROUP * GROUPS


@dataclass(frozen=True)
class Shouting:
    """Drops what says "!"."""

    action: str = "drop"

    def __call__(self, trajectory):
        return any(ord("!") in turn.completion_ids.tolist() for turn in trajectory.turns)


class Sampler(ScriptedSampler):
    """Says what `what(request number)` says; gives no logprobs where that is "silent"."""

    def __init__(self, what, **fields):
        super().__init__(script=[], vocab_size=VOCAB_SIZE, context_length=100, **fields)
        self.what = what

    def _look_up(self, index, request):
        return say(self.what(index))

    async def generate(self, request):
        completion = await super().generate(request)
        silent = completion.ids.tolist() == say("silent")
        return replace(completion, logprobs=None) if silent else completion


class Judged(Coins):
    """Rewards that a function of example and seed gives; None fails."""

    def __init__(self, reward):
        super().__init__()
        self.reward = reward

    async def start(self, example, seed):
        reward = self.reward(example, seed)
        coin = Coin(seed, reward is None)
        coin.reward = reward
        return coin


def tokens_of(notes):
    return sum(t.num_sampled_tokens for _, _, groups in notes.steps for g in groups for t in g.trajectories)


def check(orchestrator, notes):
    """The ledger against a recount of the records."""
    ledger = orchestrator.ledger_for_tests
    ledger.check(pending=0)
    assert ledger.sampled == tokens_of(notes) + ledger.dropped["cancelled"] + ledger.dropped["unused_at_end"]
    of_no_trajectory = {"cancelled", "unused_at_end"}
    booked = {"trained": ledger.trained, **ledger.dropped}
    assert tokens_by_outcome(notes) == {name: n for name, n in booked.items() if n and name not in of_no_trajectory}
    for _, metrics, _ in notes.steps:
        dropped = sum(v for k, v in metrics.items() if k.startswith("ledger/dropped/"))
        assert metrics["ledger/sampled"] == metrics["ledger/trained"] + dropped + metrics["ledger/pending"]
    return ledger


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
async def test_errors_filters_missing_logprobs_and_length_are_told_apart(tmp_path, level, strategy):
    """Of each six rollouts one fails, one shouts, one is silent, one is too long, and two are trained."""
    said = ["ok", "loud!", "silent", "x" * 40, "ok", "ok"]
    failing = iter([True, False, False, False, False, False] * 100)
    sampler = Sampler(lambda index: said[index % 6])
    environment = Judged(lambda example, seed: None if next(failing) else float(seed % 7))
    orchestrator, notes, _ = make(
        tmp_path,
        level=level,
        steps=4,
        environment=environment,
        sampler=sampler,
        filters={"shouting": Shouting()},
        max_length=30,
        strategy=strategy,
    )
    assert await orchestrator.run()
    ledger = check(orchestrator, notes)
    recount = Counter()
    for _, _, groups in notes.steps:
        for trajectory in (t for g in groups for t in g.trajectories):
            words = bytes(i for turn in trajectory.turns for i in turn.completion_ids.tolist() if i < 256).decode()
            kind = {"loud!": "filter:shouting", "silent": "missing_logprobs", "x" * 40: "over_length"}.get(words)
            recount["error" if trajectory.error else kind or "trained"] += trajectory.num_sampled_tokens
    assert set(recount) == {"error", "filter:shouting", "missing_logprobs", "over_length", "trained"}
    assert ledger.trained == recount.pop("trained")
    assert dict(ledger.dropped) == dict(recount)


@pytest.mark.parametrize("level", [0, 2])
async def test_groups_that_teach_nothing_never_reach_a_batch_and_others_take_their_place(tmp_path, level):
    """Example e0 always earns 0, e1 always 1, e2 always a half; the others earn 0 and 1 in turns."""
    fixed = {"e0": 0.0, "e1": 1.0, "e2": 0.5}
    turns = Counter()

    def reward(example, seed):
        turns[example.id] += 1
        return fixed.get(example.id, float(turns[example.id] % 2))

    orchestrator, notes, _ = make(
        tmp_path, level=level, steps=5, environment=Judged(reward), online_filtering=True, interval=2
    )
    assert await orchestrator.run()
    ledger = check(orchestrator, notes)
    everything = [g for _, _, groups in notes.steps for g in groups]
    flat = [g for g in everything if g.example_id in fixed]
    assert ledger.dropped["difficulty"] == sum(t.num_sampled_tokens for g in flat for t in g.trajectories) > 0
    assert len(everything) - len(flat) == 5 * GROUPS  # every batch is full
    counted = Counter()
    for _, metrics, _ in notes.steps:
        counted.update({k: v for k, v in metrics.items() if k.startswith("filtered_rollouts/")})
    by_example = Counter(g.example_id for g in flat)
    assert counted == {
        f"filtered_rollouts/coins/{kind}": GROUP * by_example[example]
        for example, kind in (("e0", "hard"), ("e1", "easy"), ("e2", "flat"))
    }
    indices = [int(g.group_id.removeprefix("train-")) for g in everything]
    assert len(set(indices)) == len(indices)


async def test_a_run_in_which_nothing_can_be_learned_stops_and_says_why(tmp_path):
    orchestrator, _, _ = make(tmp_path, steps=2, environment=Judged(lambda e, s: 0.0), online_filtering=True)
    with pytest.raises(RunStopped, match=r'dropped the last 150 groups, the last one as "hard" .* are 0\.0'):
        await orchestrator.run()
    assert orchestrator.ledger_for_tests.trained == 0


async def test_what_oversampling_leaves_over_is_unused_at_the_end_and_a_longer_run_goes_on_from_there(tmp_path):
    mixed = Judged(lambda example, seed: float(seed % 1000))
    orchestrator, notes, sampler = make(
        tmp_path, level=1, steps=2, environment=mixed, oversampling=2.0, online_filtering=True, token_seconds=0.0005
    )
    assert await orchestrator.run()
    ledger = check(orchestrator, notes)
    assert ledger.dropped["unused_at_end"] > 0
    assert ledger.trained == tokens_of(notes)
    longer, notes, sampler = make(tmp_path, level=1, steps=4, notes=notes)
    longer.load_state_dict(notes.saved[2])
    await sampler.update_weights(tmp_path, 2)
    assert await longer.run()
    assert longer.ledger_for_tests.dropped == {"unused_at_end": ledger.dropped["unused_at_end"]}
    check(longer, notes)
    trained = Counter(g.group_id for _, _, groups in notes.steps for g in groups)
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("level", [1, 3])
async def test_what_is_stale_and_what_a_stop_cancels_is_counted_over_a_resume(tmp_path, level):
    """Batches wait in the queue until they are older than allowed; then the run is stopped in flight and goes on."""
    trainer, answered = GatedTrainer(tmp_path), (level + 1) * BATCH
    sampler = ScriptedSampler(
        script=lambda r: say("x" * (1 + r.seed % 5)),
        vocab_size=VOCAB_SIZE,
        context_length=100,
        trouble=lambda index, request: "hang" if index >= answered + 2 else None,
    )
    first, notes, _ = make(
        tmp_path, level=level, steps=8, trainer=trainer, max_off_policy_steps=level - 1, sampler=sampler
    )
    running = asyncio.ensure_future(first.run())
    await until(lambda: len(sampler.requests) == answered and not sampler.num_in_flight)
    trainer.let(level + 1)
    await until(lambda: len(notes.steps) == level + 1 and sampler.num_in_flight == BATCH)
    first.request_stop()
    assert not await running
    saved = notes.saved[max(notes.saved)]
    assert saved["ledger"]["dropped"]["stale"] > 0
    assert saved["pending_tokens"] > 0  # of the two that had ended
    second, notes, sampler = make(tmp_path, level=level, steps=8, notes=notes, max_off_policy_steps=level - 1)
    second.load_state_dict(saved)
    await sampler.update_weights(tmp_path, second.step)
    assert second.ledger_for_tests.dropped["cancelled"] == saved["pending_tokens"]
    assert await second.run()
    check(second, notes)
    trained = Counter(g.group_id for _, _, groups in notes.steps for g in groups)
    assert trained == {f"train-{index}": 1 for index in range(8 * GROUPS)}


class PlayedUser(Coins):
    """The policy plays the user too, untrained, in a conversation of its own; its words go to the agent."""

    class Game(Coin):
        async def run(self, agent):
            messages = [{"role": "user", "content": "go"}]
            for _ in range(2):
                messages.append(await agent.sample(messages))
                asked = [{"role": "user", "content": messages[-1]["content"]}]
                heard = await agent.sample(asked, agent="user", trained=False)
                messages.append({"role": "user", "content": heard["content"]})
            await agent.sample(messages, trained=False)  # the agent's own last turn too

    async def start(self, example, seed):
        return self.Game(seed, False)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
async def test_what_is_sampled_with_trained_false_is_counted_as_untrained(tmp_path, level, strategy):
    """Two of each five turns are the user's, and one is the agent's untrained last one."""
    said = ["a", "bb", "ccc", "dddd", "eeeee"]
    orchestrator, notes, _ = make(
        tmp_path,
        level=level,
        steps=3,
        environment=PlayedUser(),
        strategy=strategy,
        sampler=Sampler(lambda index: said[index % 5]),
    )
    assert await orchestrator.run()
    ledger = check(orchestrator, notes)
    turns = [turn for _, _, groups in notes.steps for g in groups for t in g.trajectories for turn in t.turns]
    assert [turn.trained for turn in turns[:5]] == [True, False, True, False, False]
    untrained = sum(len(turn.completion_ids) for turn in turns if not turn.trained)
    assert dict(ledger.dropped) == {"untrained": untrained}
    assert ledger.trained == sum(len(turn.completion_ids) for turn in turns) - untrained > 0
    assert notes.steps[-1][1]["ledger/dropped/untrained"] == untrained


class Forgetful(Coins):
    """Two turns; the second prompt is not what the first one was, as if a template had rewritten it."""

    class Game(Coin):
        async def run(self, agent):
            await agent.sample([{"role": "user", "content": "one"}])
            await agent.sample([{"role": "user", "content": "two"}], agent="sub")
            await agent.sample([{"role": "user", "content": "other"}])

    async def start(self, example, seed):
        return self.Game(seed, False)


@pytest.mark.parametrize("level", [0, 1])
async def test_a_break_stops_a_run_that_asked_for_it_and_says_where(tmp_path, level):
    orchestrator, notes, _ = make(tmp_path, level=level, environment=Forgetful(), on_break="error")
    ours, theirs = [ord(c) for c in "other"], [ord(c) for c in "one"]
    with pytest.raises(
        RunStopped,
        match=re.escape(
            "turn 2 (main) does not extend turn 0: of its 8 prompt ids the first 2 are the same; at position 2 it has "
            f"{[*ours[1:], 260, 258]}, turn 0 has"
        ),
    ) as caught:
        await orchestrator.run()
    assert str(theirs[1:])[:-1] in str(caught.value)
    assert 'on_break = "error"' in str(caught.value)
    assert max(notes.saved) == 0


async def test_a_break_starts_another_sample_where_the_run_does_not_mind(tmp_path):
    orchestrator, notes, _ = make(tmp_path, environment=Forgetful(), steps=2)
    assert await orchestrator.run()
    check(orchestrator, notes)
    assert [metrics["samples"] for _, metrics, _ in notes.steps] == [3 * BATCH] * 2


def ended(recorder):
    """Set as soon as the recorder's episode has ended."""
    event, close = asyncio.Event(), recorder.close
    recorder.close = lambda: (close(), event.set())
    return event


class Lingering(Coins):
    """Its first episode ends while something that it started still wants to sample."""

    def __init__(self):
        super().__init__()
        self.left = []

    async def start(self, example, seed):
        environment = self

        class Game(Coin):
            async def run(self, agent):
                await agent.sample([{"role": "user", "content": "one"}])
                if not environment.left:
                    environment.left.append(asyncio.ensure_future(environment.linger(agent, ended(agent.recorder))))

        return Game(seed, False)

    async def linger(self, agent, ended):
        await ended.wait()
        await agent.sample([{"role": "user", "content": "two"}])


async def test_an_episode_that_goes_on_after_its_end_is_set_aside_and_counted(tmp_path):
    environment = Lingering()
    sampler = Sampler(lambda index: "x" if index == 0 else "yyyyyyyyyyyyyyyyyyyy", seconds_per_token=0.002)
    orchestrator, notes, _ = make(tmp_path, environment=environment, steps=1, sampler=sampler)
    assert await orchestrator.run()
    ledger = check(orchestrator, notes)
    assert ledger.dropped["error"] == 2  # "x" and the end
    (error,) = [t.error for _, _, groups in notes.steps for g in groups for t in g.trajectories if t.error]
    assert re.fullmatch(r"record: trajectory 'train-\d-\d', turn 1: sampled or recorded after .* ended", error)
    with pytest.raises(RecordError, match="after the episode had ended"):
        await environment.left[0]
    assert notes.steps[0][1]["errors/record"] == 1


def test_these_are_all_the_reasons():
    assert set(REASONS) == {
        "difficulty",
        "stale",
        "error",
        "missing_logprobs",
        "over_length",
        "cancelled",
        "lost_worker",
        "lost_replica",
        "unused_at_end",
        "untrained",
    }


class OfMixtures(ScriptedSampler):
    """Returns the experts of a model with one layer; every fifth request meets a server with another model."""

    async def generate(self, request):
        completion = await super().generate(request)
        each = 3 if request.seed % 5 == 0 else 2
        shape = (len(request.prompt_ids) + len(completion.ids) - 1, 1, each)
        return replace(completion, routed_experts=np.zeros(shape, dtype=np.uint8))


async def test_experts_of_another_model_fail_their_episode_and_are_counted(tmp_path):
    """No other rank and no later pass meets them: every sample that is trained has those of this model."""
    sampler = OfMixtures(script=lambda request: say("abc"), vocab_size=VOCAB_SIZE, context_length=100)
    routing = Routing(num_layers=1, num_experts=4, experts_per_token=2)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, routing=routing, steps=3)
    assert await orchestrator.run()
    found = [t for _, _, groups in notes.steps for group in groups for t in group.trajectories]
    wrong = [t for t in found if t.error is not None]
    assert 0 < len(wrong) < len(found)
    for trajectory in wrong:
        assert trajectory.error.startswith("sampler: recorded experts have 1 layers and 3 of at least"), (
            trajectory.error
        )
    trained = [sample for batch in orchestrator.trainer_for_tests.batches for sample in batch]
    assert trained and all(sample.routed_experts.experts.shape[2] == 2 for sample in trained)
    assert sum(trajectory.num_unrecorded_tokens for trajectory in wrong) == 4 * len(wrong)
    assert tokens_by_outcome(notes)["error"] >= 4 * len(wrong)
