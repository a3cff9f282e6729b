"""On-policy distillation, from the command line to a student that is nearer to its teacher."""

import pytest

from e2e.tiny_runs import (
    LOTS,
    SIZES,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    train_lines,
    trajectory_lines,
    workplace,
)
from rollouts.chat_server import chat_server
from verbatim.cli.main import main

SUMS = '''
from verbatim import Example
from verbatim.environments import Episode
from verbatim.environments.tools import FunctionTool


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Sum(Episode):
    tools = (FunctionTool(add, inline=True),)

    def __init__(self, numbers):
        self.messages = ({"role": "user", "content": numbers},)

    async def score(self, trajectory):
        return 1.0


class Unscored(Sum):
    """Earns nothing: what is learned is the teacher."""

    async def score(self, trajectory):
        return None


class UnscoredSums:
    def examples(self, split):
        return Sums().examples(split)

    async def start(self, example, seed):
        return Unscored(example.payload["numbers"])


class Sums:
    def examples(self, split):
        return [Example(id=f"{n}", payload={"numbers": f"{n} 2 3"}) for n in range(1, 5)]

    async def start(self, example, seed):
        return Sum(example.payload["numbers"])
'''

DISTIL = """
from verbatim.algorithms.losses import LossInputs, LossOutputs


def distil(inputs: LossInputs, scale: float = 2.0) -> LossOutputs:
    here = inputs.loss_mask
    behind = (inputs.teacher_logprobs - inputs.trainer_logprobs.detach())[here]
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs)[here].exp()
    return LossOutputs(loss=-scale * (behind * ratio).sum(), metrics={"distance": -behind.mean()})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.models.build import build_model
    from verbatim.models.trained_tokenizer import chat_text

    with workplace(tmp_path_factory.mktemp("distillation"), {"lots": LOTS, "sums": SUMS}) as folder:
        student = build_tiny_model(folder / "student")
        texts = [chat_text(shown.messages, shown.tools) for shown in GuessNumber().demonstrations(100, seed=0)]
        build_model(folder / "teacher", SIZES, texts, seed=1)
        (folder / "run.toml").write_text(TOML.format(model=student) + 'import_path = "lots.Lots"\n')
        yield folder


def run(*arguments):
    return main(["rl", "run.toml", *arguments])


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(place):
    """The rewards are those of a lottery: what falls is the distance, measured on the student's own samples."""
    options = [
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.teacher",
        '{ model = "teacher" }',
        "--orchestrator.batch-size",
        "32",
        "--max-steps",
        "40",
        "--run-dir",
        "nearer",
    ]
    assert run(*options) == 0
    lines = train_lines(place / "nearer")
    kl = [line["metrics"]["teacher_kl"] for line in lines]
    assert all(line["metrics"]["trained_tokens"] > 0 for line in lines)  # no rollout is dropped for its advantage
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5]), kl
    assert_ledger_adds_up(place / "nearer")


@pytest.mark.slow
def test_a_loss_of_ones_own_distils_with_the_teachers_logprobs(place):
    """Its gradient at `w = 1` is that of `opd` without the KL term, so it comes nearer to the teacher too."""
    (place / "my_distillation.py").write_text(DISTIL)
    options = [
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.teacher",
        '{ model = "teacher" }',
        "--trainer.loss",
        '{ type = "custom", import_path = "my_distillation.distil", kwargs = { scale = 1.0 } }',
        "--orchestrator.batch-size",
        "32",
        "--max-steps",
        "40",
        "--run-dir",
        "own",
    ]
    assert run(*options) == 0
    distance = [line["metrics"]["distance"] for line in train_lines(place / "own")]
    assert sum(distance[-5:]) < 0.5 * sum(distance[:5]), distance
    assert_ledger_adds_up(place / "own")


@pytest.mark.slow
def test_a_reward_and_a_teacher_are_followed_together(place):
    options = [
        "--trainer.loss",
        '{ type = "default", adv_tau = 0.0, teacher_tau = 1.0 }',
        "--orchestrator.teacher",
        '{ model = "teacher" }',
        "--max-steps",
        "3",
        "--run-dir",
        "both",
    ]
    assert run(*options) == 0
    assert all("teacher_kl" in line["metrics"] for line in train_lines(place / "both"))


@pytest.mark.slow
@pytest.mark.realtime
def test_a_student_imitates_what_a_teacher_behind_a_server_says(place):
    """The server's model adds numbers with a tool; every reward is 1, so that nothing but its texts can teach."""
    with chat_server() as server:
        teacher = f'{{ model = "adder", base_url = "{server.url}" }}'
        options = [
            "--orchestrator.training-mode",
            "sft",
            "--orchestrator.teacher",
            teacher,
            "--max-steps",
            "12",
            "--orchestrator.train.env.0.import-path",
            "sums.Sums",
            "--run-dir",
            "imitation",
        ]
        assert run(*options) == 0
    lines = [line["metrics"] for line in train_lines(place / "imitation")]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    said = trajectory_lines(place / "imitation")[0]
    assert [len(turn["tool_calls"]) for turn in said["turns"]] == [1, 1, 0]
    assert all(turn["logprobs"] is None for turn in said["turns"])
    last = assert_ledger_adds_up(place / "imitation")
    assert last["ledger/trained"] == last["ledger/sampled"]


def assert_everything_was_trained(folder):
    last = assert_ledger_adds_up(folder)
    assert last["ledger/trained"] == last["ledger/sampled"] > 0
    assert all(line["metrics"]["grad_norm"] > 0 for line in train_lines(folder))


@pytest.mark.slow
def test_distillation_needs_no_reward(place):
    options = [
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.teacher",
        '{ model = "teacher" }',
        "--orchestrator.train.env.0.import-path",
        "sums.UnscoredSums",
        "--run-dir",
        "unscored",
    ]
    assert run(*options) == 0
    assert_everything_was_trained(place / "unscored")


@pytest.mark.slow
def test_a_loss_of_ones_own_distils_without_a_reward(place):
    (place / "my_distillation.py").write_text(DISTIL)
    options = [
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.teacher",
        '{ model = "teacher" }',
        "--trainer.loss",
        '{ type = "custom", import_path = "my_distillation.distil" }',
        "--orchestrator.train.env.0.import-path",
        "sums.UnscoredSums",
        "--run-dir",
        "own_unscored",
    ]
    assert run(*options) == 0
    assert_everything_was_trained(place / "own_unscored")


@pytest.mark.slow
@pytest.mark.realtime
def test_imitation_needs_no_reward(place):
    with chat_server() as server:
        teacher = f'{{ model = "adder", base_url = "{server.url}" }}'
        options = [
            "--orchestrator.training-mode",
            "sft",
            "--orchestrator.teacher",
            teacher,
            "--orchestrator.train.env.0.import-path",
            "sums.UnscoredSums",
            "--run-dir",
            "copy",
        ]
        assert run(*options) == 0
    assert_everything_was_trained(place / "copy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--orchestrator.training-mode", "sft", "--orchestrator.teacher", '{ model = "teacher" }'],
            "needs an [orchestrator.teacher] table with model and base_url",
        ),
        (["--orchestrator.training-mode", "opd"], "needs an [orchestrator.teacher] table"),
        (["--trainer.loss", '{ type = "default", teacher_tau = 1.0 }'], "needs an [orchestrator.teacher] table"),
        (["--trainer.loss.adv-tau", "0"], "or a teacher to follow instead"),
        (
            [
                "--orchestrator.training-mode",
                "opd",
                "--orchestrator.teacher",
                '{ model = "teacher" }',
                "--trainer.loss.type",
                "ppo",
            ],
            "which brings its own loss",
        ),
        (
            [
                "--orchestrator.training-mode",
                "sft",
                "--orchestrator.teacher",
                '{ model = "t", base_url = "http://127.0.0.1:1/v1" }',
                "--trainer.loss",
                '{ type = "custom", import_path = "math.fsum" }',
            ],
            'training_mode = "sft" brings its own loss',
        ),
        (["--trainer.loss.type", "opd"], "needs an [orchestrator.teacher] table"),
        (
            [
                "--orchestrator.training-mode",
                "opd",
                "--orchestrator.sampling.temperature",
                "0.7",
                "--orchestrator.teacher",
                '{ model = "t", base_url = "http://127.0.0.1:1/v1" }',
            ],
            "at temperature 1 only",
        ),
        (
            ["--orchestrator.training-mode", "opd", "--orchestrator.teacher", '{ model = "./nowhere" }'],
            "no model folder",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(place, capsys, arguments, message):
    assert run(*arguments, "--run-dir", "refused") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (place / "refused").exists()
