"""`verbatim env check`: every mistake is found, by its name, and what is sound comes out clean."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from inspection.envcheck import broken_environments
from inspection.envcheck.forked_replay import warm_replay
from verbatim.cli.main import main
from verbatim.environments import ENVIRONMENTS, EXTRAS
from verbatim.inspection.envcheck import KINDS, CheckSettings, check_environment
from verbatim.inspection.envcheck.watch import BLOCKED, LoopWatch
from waiting import HANGS

__all__ = ["warm_replay"]
pytestmark = [pytest.mark.realtime, pytest.mark.usefixtures("nothing_blocks")]
QUICK = CheckSettings(num_examples=3, timeout=HANGS)


def kinds(name: str, **settings) -> dict[str, str]:
    """What was found, by kind."""
    how = CheckSettings(**{"num_examples": 3, "timeout": HANGS, **settings})
    found: dict[str, str] = {}
    for finding in check_environment(f"inspection.envcheck.broken_environments.{name}", {}, how).findings:
        found[finding.kind] = f"{found.get(finding.kind, '')}{finding.found}\n"
    return found


@pytest.mark.slow
def test_a_sound_environment_is_clean_and_its_solution_succeeds():
    report = check_environment("inspection.envcheck.broken_environments.Sound", {}, QUICK)
    assert report.findings == ()
    assert report.num_examples == {"train": 3, "eval": 2}
    assert report.players["solution"].success == 1.0
    assert report.players["random"].episodes == 2 * 3 + 4 * 3  # the probes, and four of each example


# Name, kind, words of what is found.
BROKEN = [
    ("NoExamples", "examples", 'examples("train") is empty'),
    ("NoHeldOut", "examples", 'examples("eval") is empty'),
    ("SameId", "examples", "'one' twice"),
    ("SameTask", "examples", "4 examples are the same except for their ids"),
    ("OtherExamples", "nondeterministic", "gave different examples"),
    ("OnTheEnvironment", "shared_state", "message 0 (user) was 'Game 1"),
    ("OnTheClass", "shared_state", "differs after other episodes were played"),
    ("TakesFromTheExample", "shared_state", "differs after other episodes were played"),
    ("NeverReached", "score_unreached", "the episode's own solution earned 0.1"),
    ("AlwaysTheSame", "score_constant", "the score was 0.5 in all 18 episodes"),
    ("NoDescription", "no_description", "what other does"),
    ("LongPrompt", "too_long", "of 3 of 3 examples leave no room in seq_len = 2,048, tools included: 'red' (about 2,5"),
    ("NeverAsks", "no_turns", "the policy sampled nothing before the episode ended (stop)"),
    ("LongAnswer", "too_long", "answer was cut"),
    ("NeverEnds", "endless", "ended on its own within 16 turns"),
    ("ToolRaises", "tool_raises", "KeyError: 'hint'"),
    ("ReplyRaises", "raises", "reply raised KeyError: 'nothing said'"),
    ("IgnoresTheSeed", "nondeterministic", "played first in two processes"),
    ("OrderOfASet", "nondeterministic", "played first in two processes: message 0 (user)"),
    ("NotFinite", "reward", "score returned nan"),
    ("OtherTools", "demonstrations", "differs in the tools"),
    ("BadDemonstrations", "demonstrations", "gave an empty list"),
]


DIFFERS_IN_A_PROCESS = ("IgnoresTheSeed", "OrderOfASet")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "words"), BROKEN, ids=[name for name, *_ in BROKEN])
def test_a_mistake_is_found_alone(name: str, kind: str, words: str, request: pytest.FixtureRequest):
    if name not in DIFFERS_IN_A_PROCESS:
        request.getfixturevalue("warm_replay")
    found = kinds(name)
    assert list(found) == [kind]
    assert words in found[kind]


class Noted(dict[str, float]):
    def __setitem__(self, place: str, seconds: float) -> None:
        super().__setitem__(place, seconds)
        broken_environments.seen.set()


@pytest.mark.slow
def test_a_tool_that_blocks_is_found_with_its_place(monkeypatch, warm_replay):
    """It blocks until it was seen."""
    monkeypatch.setattr("verbatim.inspection.envcheck.watch.BLOCKED", BLOCKED)

    class Watch(LoopWatch):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            self.blocked = Noted()

    monkeypatch.setattr("verbatim.inspection.envcheck.check.LoopWatch", Watch)
    monkeypatch.setattr(broken_environments, "seen", threading.Event())
    found = kinds("Blocks", num_examples=1)
    assert list(found) == ["blocks"]
    assert re.search(r"broken_environments.py:\d+ in hint blocked the event loop for \d+\.\d s", found["blocks"])


@pytest.mark.slow
def test_code_that_never_gives_the_loop_back_is_given_up(monkeypatch):
    monkeypatch.setattr("verbatim.inspection.envcheck.check.LoopWatch", lambda give_up_after, own: LoopWatch(0.5, own))
    found = kinds("Freezes", num_examples=1)
    assert "in reply blocked the event loop and was abandoned" in found["blocks"]


@pytest.mark.parametrize(
    ("looks", "blocked"),
    [([0.1] + [0.05] * 4, {}), ([0.1] + [0.05] * 6, {"my_env.py:1 in f": pytest.approx(0.3)}), ([0.1, 10.0, 0.05], {})],
)
def test_code_is_at_fault_for_the_time_in_which_it_was_looked_at(looks, blocked, monkeypatch):
    """In ten seconds without a look the machine stood still."""
    monkeypatch.setattr("verbatim.inspection.envcheck.watch.BLOCKED", BLOCKED)
    now, left = [100.0], list(looks)

    class LooksOnly:
        """A thread that has begun and does nothing, until it has been looked at as often."""

        ident = 1

        def __init__(self, target, **named):
            self.target = target

        def start(self) -> None:
            pass

        def join(self, seconds: float) -> None:
            now[0] += left.pop(0)

        def is_alive(self) -> bool:
            if not left:
                self.target()
            return bool(left)

    async def nothing() -> None:
        pass

    monkeypatch.setattr("verbatim.inspection.envcheck.watch.threading", SimpleNamespace(Thread=LooksOnly))
    monkeypatch.setattr("verbatim.inspection.envcheck.watch.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("verbatim.inspection.envcheck.watch._place", lambda frame, own: "my_env.py:1 in f")
    watch = LoopWatch(5.0)
    watch.run(nothing())
    assert watch.blocked == blocked


@pytest.mark.slow
def test_an_episode_that_hangs_ends_at_its_time():
    found = kinds("Hangs", num_examples=1, timeout=0.5)
    assert list(found) == ["endless"]
    assert "timeout: the episode took more than 0.5 s" in found["endless"]


def test_every_kind_of_finding_has_a_broken_environment():
    assert {kind for _, kind, _ in BROKEN} | {"blocks"} == set(KINDS)


NEED_MORE = (*EXTRAS, "single_turn", "judged", "program")
"""Those that have tasks to choose from, or need data, a judge or a program, which `verbatim gateway check` plays."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in NEED_MORE])
def test_the_bundled_environments_are_clean(name: str, capsys):
    args = {"limits": {"timeout": HANGS}} if name == "terminal" else {}
    settings = {"examples": 2, "timeout": HANGS, "args": json.dumps(args)}
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    assert main(["env", "check", name, "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["findings"]) == (True, [])
    assert report["players"]["solution"] == {"episodes": 2, "mean_reward": pytest.approx(1.0), "success": 1.0}


# ---- the command

MINE = """\
from verbatim import Example
from verbatim.environments import Episode, Reply

class Echo(Episode):
    def __init__(self, word):
        self.word, self.said = word, ""
        self.messages = [{"role": "user", "content": f"Say {word}."}]

    async def reply(self, message):
        self.said = message["content"]
        return Reply(done=True)

    async def score(self, trajectory):
        return float(self.said == self.word)

    def solution(self):
        return [{"role": "assistant", "content": self.word}]

class Echoes:
    def __init__(self, shout: bool = False):
        self.shout = shout

    def examples(self, split):
        words = ["one", "two"] if split == "train" else ["three"]
        return [Example(id=word, payload={"word": word.upper() if self.shout else word}) for word in words]

    async def start(self, example, seed):
        return Echo(example.payload["word"])
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "echo_of_mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.slow
def test_a_file_is_checked_by_its_path_and_the_one_environment_in_it_is_found(mine: Path, capsys, warm_replay):
    assert main(["env", "check", str(mine)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("echo_of_mine.Echoes: nothing wrong\n")
    assert "solution player: 2 episodes, mean reward 1.000, success 1.00" in said
    assert main(["env", "check", f"{mine}:Echoes", "--args", '{"shout": true}', "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clean"] is True


@pytest.mark.slow
def test_the_environments_of_a_run_are_checked_with_its_settings(mine: Path, capsys, monkeypatch, warm_replay):
    monkeypatch.chdir(mine.parent)
    run = mine.parent / "run.toml"
    run.write_text(
        '[model]\nname = "some/model"\n[orchestrator]\nseq_len = 2\n[[orchestrator.train.env]]\n'
        'import_path = "echo_of_mine.Echoes"\nargs = { shout = true }\n'
    )
    assert main(["env", "check", str(run)]) == 1
    said, aside = capsys.readouterr()
    assert "note: the tokens of opening prompts are estimated: there is no folder 'some/model' here" in aside
    assert "too_long" in said
    assert "seq_len = 2 tokens" in said
    assert "continues the sampled tokens" not in aside  # without the model nothing is known of it
    run.write_text(
        run.read_text().replace('name = "some/model"', "build = { }")
        + '[orchestrator.renderer]\nthinking_retention = "all"\n'
    )
    assert main(["env", "check", str(run)]) == 1
    said = capsys.readouterr().err  # the tokenizer of a model that is built is trained on demonstrations
    assert (
        "the tokens of opening prompts are estimated: environment 'echo_of_mine.Echoes' has no demonstrations" in said
    )
    run.write_text(run.read_text() + '[orchestrator.advantage]\ntype = "chunk_returns"\ngama = 0.5\n')
    assert main(["env", "check", str(run)]) == 2
    assert 'did you mean "gamma"' in capsys.readouterr().err


def test_a_report_says_what_was_found_and_expected_and_what_to_change(capsys, warm_replay):
    assert main(["env", "check", "inspection.envcheck.broken_environments:NoDescription", "--examples", "1"]) == 1
    said = capsys.readouterr().out
    assert "  found: the model is not told what other does\n" in said
    assert "  expected: a description in every tool's schema\n" in said
    assert "  change: write a docstring" in said


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["check"], "which environment?"),
        (["check", "guess_numbr"], "there is no environment 'guess_numbr'"),
        (["check", "nothing_here.py"], "there is no file nothing_here.py"),
        (["check", "guess_number", "--turns", "3"], "verbatim env has no option --turns"),
        (["check", "verifiers"], "taskset"),
        (["list", "--args", "{}"], "--args is for verbatim env check ENVIRONMENT"),
        (["list", "reasoning_gym", "--max-turns", "3"], "--max-turns is for verbatim env check ENVIRONMENT"),
    ],
)
def test_what_cannot_be_checked_is_refused(typed: list[str], told: str, capsys):
    assert main(["env", *typed]) == 2
    assert told in capsys.readouterr().err


def test_a_file_with_two_environments_asks_which(mine: Path, capsys):
    two = mine.parent / "two_of_mine.py"
    two.write_text(MINE + "\nclass Again(Echoes):\n    pass\n")
    assert main(["env", "check", str(two)]) == 2
    assert f"has the classes Echoes, Again; type for example: verbatim env check {two}:Echoes" in (
        capsys.readouterr().err
    )


def test_the_bundled_environments_are_listed(capsys):
    assert main(["env", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == set(ENVIRONMENTS)
    assert listed["guess_number"].startswith("The agent calls `guess(number)`")
