"""Difficulty pools in a run: what is settled is judged, a drained data set ends it, and a resume goes on with them."""

import asyncio
import logging
from collections import Counter

import pytest

from run.orchestrator.loop_runs import GROUPS, Coin, Coins, make
from verbatim.algorithms.curriculum import PoolRules
from verbatim.core.errors import RunStopped
from verbatim.logs.checkpoints import read_loop_state, write_loop_state

TRIVIAL, IMPOSSIBLE = {"e0", "e1"}, {"e2", "e3"}


class Uneven(Coins):
    """Two of its seven examples always earn 1, two always 0, the others 0 and 1 in turns (`hopeless`: always 0)."""

    def __init__(self, hopeless=False):
        super().__init__()
        self.hopeless, self.turns = hopeless, Counter()

    async def start(self, example, seed):
        coin = Coin(seed, False)
        self.turns[example.id] += 1
        coin.reward = (
            float(example.id in TRIVIAL)
            if example.id in TRIVIAL | IMPOSSIBLE or self.hopeless
            else float(self.turns[example.id] % 2)
        )
        return coin


RULES = PoolRules(easy_threshold=1.0, hard_threshold=0.0)


def drawn(notes, since=0):
    return Counter(g.example_id for step, _, groups in notes.steps if step > since for g in groups)


@pytest.mark.parametrize("level", [0, 1])
async def test_after_the_first_pass_only_what_can_be_learned_is_sampled(tmp_path, level):
    orchestrator, notes, _ = make(tmp_path, level=level, steps=12, environment=Uneven(), pool_rules=RULES)
    assert await orchestrator.run()
    # A pass is 7 groups; up to 2 + level batches of 3 more are drawn before the last of them is settled.
    assert set(drawn(notes, since=3 + 2 + level)) == {"e4", "e5", "e6"}
    last = notes.steps[-1][1]
    assert last["pool/coins/easy"] == last["pool/coins/hard"] == pytest.approx(2 / 7)
    assert last["pool/coins/normal"] == pytest.approx(3 / 7)
    evicted = sum(m["evicted_examples/coins/easy"] * GROUPS for _, m, _ in notes.steps)
    assert evicted == pytest.approx(2)


async def test_a_drained_data_set_ends_the_run_with_everything_settled(tmp_path, caplog):
    orchestrator, notes, _ = make(
        tmp_path, level=1, steps=50, environment=Uneven(hopeless=True), pool_rules=RULES, evaluate=True
    )
    with caplog.at_level(logging.WARNING):
        assert await orchestrator.run()
    assert 2 <= orchestrator.step < 10
    assert any(
        f"the run ends after {orchestrator.step} of 50 steps: every example is in a difficulty pool (coins: 2 easy, "
        "5 hard)" in message
        for message in caplog.messages
    )
    orchestrator.ledger_for_tests.check(pending=0)
    assert notes.evals[-1][0] == orchestrator.step
    assert max(notes.saved) == orchestrator.step


class OneHardGroup(Coins):
    """One example; its first group earns nothing and ends first, every other one earns 0 and 1."""

    def __init__(self):
        super().__init__()
        self.started = -10  # the first evaluation

    def examples(self, split):
        return super().examples(split)[:1]

    async def start(self, example, seed):
        coin = Coin(seed, False)
        self.started += 1
        coin.reward = float(self.started > 2 and self.started % 2)
        await asyncio.sleep(0.01 if self.started > 2 else 0.0)
        return coin


async def test_a_data_set_that_is_drained_while_the_last_batch_is_in_flight_cuts_nothing_short(tmp_path, caplog):
    """Six groups are in flight for a batch of three; the first one is dropped, and its example with it."""
    orchestrator, notes, _ = make(
        tmp_path,
        steps=1,
        environment=OneHardGroup(),
        pool_rules=RULES,
        oversampling=2.0,
        online_filtering=True,
        evaluate=True,
    )
    with caplog.at_level(logging.WARNING):
        assert await orchestrator.run()
    assert orchestrator.step == 1
    assert not any("the run ends after" in message for message in caplog.messages)
    assert [step for step, _ in notes.evals] == [0, 1]


async def test_a_drained_run_goes_on_when_a_share_comes_back(tmp_path):
    first, notes, _ = make(tmp_path, steps=50, environment=Uneven(hopeless=True), pool_rules=RULES)
    assert await first.run()
    rules = PoolRules(easy_threshold=2.0, hard_threshold=-1.0, hard_fraction=1.0)
    second, notes, sampler = make(tmp_path, steps=first.step + 3, environment=Uneven(), pool_rules=rules, notes=notes)
    second.load_state_dict(notes.saved[first.step])
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    assert second.step == first.step + 3
    assert not set(drawn(notes, since=first.step)) & TRIVIAL  # easy_fraction is 0: these stay away
    second.ledger_for_tests.check(pending=0)


async def test_with_online_filtering_the_examples_of_dropped_groups_are_judged_too(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=6, environment=Uneven(), pool_rules=RULES, online_filtering=True)
    assert await orchestrator.run()
    assert set(orchestrator.pools_for_tests.members("coins", "easy")) == TRIVIAL
    assert set(orchestrator.pools_for_tests.members("coins", "hard")) == IMPOSSIBLE
    trained = Counter(
        t.example_id for _, _, groups in notes.steps for g in groups for t in g.trajectories if t.advantage is not None
    )
    assert set(trained) == {"e4", "e5", "e6"}


class Unscored(Coins):
    """The examples `never` get no reward at all, and of each group of the others the first rollout gets none."""

    def __init__(self, never=frozenset(), reward=1.0):
        super().__init__()
        self.never, self.reward, self.started = never, reward, Counter()

    async def start(self, example, seed):
        coin = Coin(seed, False)
        self.started[example.id] += 1
        first = self.started[example.id] % 2 == 1  # groups are of two
        coin.reward = None if example.id in self.never or first else self.reward
        return coin


async def test_an_example_that_was_never_scored_is_in_no_pool(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=4, environment=Unscored({"e0", "e1"}, 0.5), pool_rules=RULES)
    assert await orchestrator.run()
    assert drawn(notes)["e0"] and drawn(notes)["e1"]
    assert orchestrator.pools_for_tests.members("coins", "hard") == []  # 0 was earned by no rollout
    assert orchestrator.pools_for_tests.members("coins", "easy") == []


async def test_a_reward_that_is_missing_beside_one_that_is_there_is_not_in_the_mean(tmp_path):
    orchestrator, _, _ = make(tmp_path, steps=2, environment=Unscored(), pool_rules=RULES)
    assert await orchestrator.run()
    # The groups (missing, 1) have the mean 1.
    assert len(orchestrator.pools_for_tests.members("coins", "easy")) == 2 * GROUPS


async def test_one_reward_beside_a_missing_one_is_filtered_as_its_only_advantage_is_0(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=2, environment=Unscored(reward=1.0), online_filtering=True)
    with pytest.raises(RunStopped, match=r'the last one as "easy" \(all its rewards are 1.0\)'):
        await orchestrator.run()
    assert notes.steps == []


async def test_a_stopped_run_draws_what_an_unstopped_one_draws(tmp_path):
    straight, expected, _ = make(tmp_path, steps=8, environment=Uneven(), pool_rules=RULES)
    assert await straight.run()
    first, notes, _ = make(tmp_path, steps=4, environment=Uneven(), pool_rules=RULES)
    assert await first.run()
    environment = Uneven()
    environment.turns.update({f"e{i}": 2 for i in range(7)})  # even: the coins go on as they would have
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_loop_state(folder, notes.saved[4])
    second, notes, sampler = make(tmp_path, steps=8, environment=environment, pool_rules=RULES, notes=notes)
    second.load_state_dict(read_loop_state(folder))
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    order = [[g.example_id for g in groups] for _, _, groups in notes.steps]
    assert order == [[g.example_id for g in groups] for _, _, groups in expected.steps]


def test_each_pool_is_a_file_of_the_checkpoint(tmp_path):
    orchestrator, _, _ = make(tmp_path, environment=Uneven(), pool_rules=RULES)
    orchestrator.pools_for_tests.observe("coins", "e1", 1.0)
    orchestrator.pools_for_tests.observe("coins", "e2", 0.0)
    state = orchestrator.state_dict()
    write_loop_state(tmp_path, state)
    easy = '{"env": "coins", "example_id": "e1", "mean_reward": 1.0}\n'
    assert (tmp_path / "easy_examples.jsonl").read_text() == easy
    assert (tmp_path / "hard_examples.jsonl").read_text() == easy.replace("e1", "e2").replace("1.0", "0.0")
    assert read_loop_state(tmp_path) == state
