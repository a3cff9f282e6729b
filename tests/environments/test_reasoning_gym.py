"""Tasks of reasoning-gym: the package's questions, reproducible by seed, and the package's own scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from campaigns import sized
from verbatim import RolloutIdentity, build_samples
from verbatim.cli.main import main
from verbatim.core.errors import ComponentError, UsageError
from verbatim.environments.reasoning_gym import HASHED, ReasoningGym
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode
from waiting import HANGS

pytestmark = pytest.mark.extras

TASKS = [
    "chain_sum",
    "countdown",
    "letter_counting",
    "maze",
    "propositional_logic",
    "shortest_path",
    "spell_backward",
    "sudoku",
    "tower_of_hanoi",
    "word_sorting",
    "basic_arithmetic",
]


async def play(environment, example, said):
    sampler = ScriptedSampler(script=[say(said)], vocab_size=VOCAB_SIZE, context_length=20_000)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=10_000),
        limits=EpisodeLimits(max_context=20_000),
        recorder=Recorder(VOCAB_SIZE),
        seed=0,
    )
    identity = RolloutIdentity(example_id=example.id)
    return await run_episode(environment=environment, example=example, seed=0, loop=loop, identity=identity)


@pytest.mark.parametrize("task", TASKS)
async def test_questions_and_scores_are_the_packages(task: str):
    import reasoning_gym

    environment = ReasoningGym(task=task, seed=3, num_train=4, num_eval=2)
    direct = reasoning_gym.create_dataset(task, seed=3, size=6)
    held_out = environment.examples("eval")
    assert [example.payload["index"] for example in held_out] == [4, 5]
    for example, entry in zip(held_out, [direct[4], direct[5]], strict=True):
        for answer in (entry["answer"] or "True", "7", "1 2 3"):
            trajectory = await play(environment, example, f"Well: <answer>3</answer> <answer> {answer}\n</answer>")
            assert trajectory.error is None
            assert trajectory.messages[-2]["content"] == entry["question"]
            assert trajectory.reward == direct.score_answer(answer.strip(), entry)
            (sample,) = build_samples(trajectory)
            assert sample.num_trained_tokens == trajectory.num_sampled_tokens


async def test_an_answer_without_tags_is_scored_as_missing():
    import reasoning_gym

    environment = ReasoningGym(task="chain_sum", num_train=1, num_eval=1)
    (example,) = environment.examples("train")
    right = reasoning_gym.create_dataset("chain_sum", seed=0, size=2)[0]["answer"]
    assert (await play(environment, example, right)).reward == 0.0
    assert (await play(environment, example, f"<answer>{right}</answer>")).reward == 1.0


async def test_a_scorer_that_raises_gives_0_and_says_so():
    environment = ReasoningGym(task="prime_factorization")
    trajectory = await play(environment, environment.examples("train")[0], "<answer>two</answer>")
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.info["score_error"].startswith("ValueError: invalid literal for int()")


def test_parameters_reach_the_package():
    environment = create_environment("reasoning-gym", {"task": "chain_sum", "params": {"min_terms": 9, "max_terms": 9}})
    assert environment.entry(0)["question"].count("+") + environment.entry(0)["question"].count("-") == 8


@pytest.mark.parametrize(
    ("args", "kind", "said"),
    [
        ({"task": "chain_sums"}, UsageError, "no task 'chain_sums'; did you mean \"chain_sum\"?"),
        ({"task": "chain_sum", "params": {"terms": 3}}, ComponentError, "unexpected keyword argument 'terms'"),
        ({"task": "chain_sum", "params": {"min_terms": 0}}, ComponentError, "min_terms must be positive"),
        ({"task": "chain_sum", "params": {"size": 3}}, UsageError, "the arguments seed, num_train and num_eval"),
        ({"task": "ransom_note"}, UsageError, "start with PYTHONHASHSEED=0"),
        ({"task": "chain_sum", "num_eval": 0}, UsageError, "at least 1 of each"),
    ],
)
def test_what_does_not_fit_is_refused(args, kind, said, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(kind) as raised:
        create_environment("reasoning_gym", args)
    assert said in str(raised.value)


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[environments\]'"):
        ReasoningGym(task="chain_sum")
    assert main(["env", "list", "reasoning_gym"]) == 2
    assert "pip install 'verbatim-rl[environments]'" in capsys.readouterr().err


def test_the_listing_names_every_task(capsys):
    assert main(["env", "list", "reasoning_gym", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) >= 100
    assert set(TASKS) | HASHED <= set(listed)
    assert listed["word_ladder"] == "algorithmic, needs PYTHONHASHSEED"


def test_a_task_without_answers_has_no_demonstrations():
    with pytest.raises(UsageError, match="'propositional_logic' come without answers"):
        ReasoningGym(task="propositional_logic").demonstrations(2, 0)


def check(task: str) -> int:
    return main(
        [
            "env",
            "check",
            "reasoning_gym",
            "--args",
            json.dumps({"task": task}),
            "--examples",
            "2",
            "--timeout",
            f"{HANGS:g}",
        ]
    )


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("task", [name for name in TASKS if name != "propositional_logic"][:: sized(4, 1)])
def test_env_check_finds_nothing_wrong(task: str, capsys, campaign):
    row = campaign("tasks of reasoning-gym, checked")
    found = check(task)
    row.add(wrong=found != 0)
    assert found == 0, capsys.readouterr().out


def test_env_check_finds_a_task_with_a_wrong_score(monkeypatch, capsys):
    monkeypatch.setattr("verbatim.inspection.envcheck.check.play_elsewhere", lambda *given: "not here")
    monkeypatch.setattr(ReasoningGym, "score", lambda self, answer, entry: float("nan"))
    assert check("chain_sum") == 1
    assert "score returned nan" in capsys.readouterr().out


DIGESTS = """
import hashlib, json, random, sys
from verbatim.environments.reasoning_gym import ReasoningGym
random.seed(int(sys.argv[1]))
digests = {}
for name in sys.argv[2:]:
    environment = ReasoningGym(task=name, num_train=9, num_eval=1)
    entries = [environment.entry(i) for i in (0, 5, 9)]
    told = json.dumps([[entry["question"], str(entry["answer"])] for entry in entries])
    digests[name] = hashlib.md5(told.encode()).hexdigest()
print(json.dumps(digests))  # some tasks print too
"""


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.realtime
def test_all_tasks_but_the_hashed_ones_are_the_same_in_every_process(campaign):
    names = sorted({*HASHED, *[name for name, _ in ReasoningGym.listing()][:: sized(5, 1)]})
    assert len(names) >= 20
    digests = []
    for seed in ("1", "2", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS, seed, *names],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(json.loads(done.stdout[done.stdout.index("{") :]))
    first, other, again = digests
    row = campaign("tasks of reasoning-gym, in three processes")
    for name in names:
        row.add(wrong=(first[name] != other[name]) != (name in HASHED) or other[name] != again[name])
    assert row.wrong == 0
