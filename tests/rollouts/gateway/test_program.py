"""Programs as environments: each run of one is an episode; what goes wrong in it is data under its own reason."""

import asyncio
import contextlib
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from scripted_gateway import play

from byte_renderer import VOCAB_SIZE, ByteRenderer
from verbatim import build_samples
from verbatim.core import redaction
from verbatim.core.errors import EnvironmentFault, UsageError
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from verbatim.rollouts.gateway.program.environment import read_reward
from verbatim.rollouts.gateway.program.launch import _prefixes
from verbatim.rollouts.gateway.program.process import VARIABLE, ProgramProcess, kill_marked
from verbatim.rollouts.gateway.program.reused import ReusedPrograms
from verbatim.rollouts.gateway.service import Service
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime
PROGRAMS = Path(__file__).parent / "programs"
PYTHON = "/usr/bin/python3"
"""One that every user can run, also the sandbox's."""
OWN, EPISODE = 600.0, 6000.0
"""Seconds for a program and for its episode: far more than it needs. Where one of them has to run out, the test says
when (`Clock`)."""
WAYS = [pytest.param(False, id="plain"), pytest.param(True, id="sandbox")]


def make(sandbox=False, script="asks.py", arguments=(), rows=({"texts": ["hi"]},), **args):
    return create_environment(
        "program",
        {"command": [PYTHON, script, *arguments], "cwd": str(PROGRAMS), "data": list(rows), "sandbox": sandbox, **args},
    )


def sampler(**options):
    return ScriptedSampler(script=play, vocab_size=VOCAB_SIZE, context_length=10_000, **options)


async def run_all(environment, engine=None):
    """One trajectory of each example, all at once."""
    setup = RolloutSetup(
        env="program",
        environment=environment,
        sampler=engine or sampler(),
        renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=100),
        slots=asyncio.Semaphore(64),
        limits=EpisodeLimits(max_turns=8, max_context=5000, timeout=EPISODE),
    )
    runs = [
        GroupRun(setup, example, index=n, size=1, run_seed=0).run()
        for n, example in enumerate(environment.examples("train"))
    ]
    return [group.trajectories[0] for group in await asyncio.gather(*runs)]


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_program_plays_each_example_and_its_last_line_is_the_reward(sandbox):
    engine = sampler()
    rows = [{"id": "one", "texts": ["hello"]}, {"id": "two", "texts": ["a", "bc", "def"]}]
    one, two = await run_all(make(sandbox, rows=rows), engine)
    assert [t.error for t in (one, two)] == [None, None]
    assert (one.reward, len(one.turns), one.stop_reason) == (len("8:hello"), 1, "stop")
    assert [bytes(i for i in turn.completion_ids if i < 256) for turn in two.turns] == [b"4:a", b"13:bc", b"25:def"]
    assert len(build_samples(two)) == 1
    assert sorted(r.prompt_ids.tobytes() for r in engine.requests) == sorted(
        turn.prompt_ids.tobytes() for t in (one, two) for turn in t.turns
    )
    assert two.info["program"]["status"] == 0
    assert 0 < two.info["program"]["seconds_to_first_request"] < two.info["program"]["seconds"]
    assert [m["role"] for m in two.messages] == ["user", "assistant"] * 3


class Clock:
    """Lets limits of time run out, once a test has seen what comes before; and knows the programs that were started."""

    def __init__(self, monkeypatch):
        self.limits, self.programs = [], []
        timeout, start = asyncio.timeout, ProgramProcess.start

        def noting(seconds):
            self.limits.append((seconds, made := timeout(seconds)))
            return made

        async def started(program, key=""):
            self.programs.append(program)
            await start(program, key)

        monkeypatch.setattr(asyncio, "timeout", noting)
        monkeypatch.setattr(ProgramProcess, "start", started)

    @property
    def own(self):
        """The limits of programs' own time that have begun."""
        return [limit for seconds, limit in self.limits if seconds == OWN]

    @property
    def waiting(self):
        """The limits of waits for a place: what is left of an episode, less 5 s."""
        return [limit for seconds, limit in self.limits if seconds is not None and 0.9 * EPISODE < seconds < EPISODE]

    def run_out(self, limits):
        """As if their seconds had passed; those that are over stay so."""
        for limit in limits:
            with contextlib.suppress(RuntimeError):
                limit.reschedule(asyncio.get_running_loop().time())

    async def until_said(self, text):
        """Until a program has written this."""
        await until(lambda: any(text in program.outcome().stdout for program in self.programs))


@pytest.fixture(autouse=True)
def no_deadline_of_a_program_passes_by_itself(monkeypatch):
    monkeypatch.setattr("verbatim.rollouts.gateway.program.process.START_SECONDS", HANGS)
    monkeypatch.setattr("verbatim.rollouts.gateway.program.environment.SCORE_SECONDS", HANGS)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


async def hung(sandbox, rows, clock):
    """The trajectory of a program that hangs after it has said so."""
    running = asyncio.create_task(run_all(make(sandbox, rows=rows, timeout=OWN)))
    await clock.until_said("waiting")
    clock.run_out(clock.own)
    (trajectory,) = await running
    return trajectory


@pytest.mark.parametrize("sandbox", WAYS)
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("crash", "program_crashed", "exit status 1; it said 'it broke'"),
        ("late", "program_crashed", "exit status 3"),
        ("silent", "program_silent", "without a request"),
        ("kill", "program_crashed", "exit status 137"),
        ("hang", "program_hung", "it did not end within 600 s; so far it said 'waiting'"),
        ("no reward", "environment", "the last line has no reward: found 'done'"),
    ],
)
async def test_what_goes_wrong_is_counted_under_its_own_reason(sandbox, how, kind, said, clock):
    rows = [{"texts": ["hi"], "how": how}]
    (trajectory,) = [await hung(sandbox, rows, clock)] if how == "hang" else await run_all(make(sandbox, rows=rows))
    assert trajectory.error.startswith(f"{kind}: ") and said in trajectory.error
    assert trajectory.reward is None
    assert len(trajectory.turns) == (how not in ("crash", "silent"))


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_variable_of_ours_reaches_a_program_by_its_name_and_stands_in_no_error(sandbox, monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", set())
    monkeypatch.setenv("PLAIN_NAME", "open sesame")
    environment = make(sandbox, rows=[{"texts": ["hi"], "how": "tell"}], env_from={"SEARCH_KEY": "PLAIN_NAME"})
    (trajectory,) = await run_all(environment)
    assert trajectory.error == "program_crashed: the program ended with exit status 1; it said 'my key is [redacted].'"


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_program_whose_processes_hold_too_much_together_is_ended(sandbox):
    (trajectory,) = await run_all(make(sandbox, rows=[{"texts": ["hi"], "how": "share"}], memory_mb=100))
    assert "program_crashed: the program ended with more than 100 MiB held by its processes" in trajectory.error


async def test_a_failure_can_have_a_reward():
    rows = [{"texts": ["hi"], "how": "late"}, {"texts": ["hi"], "how": "silent"}, {"texts": ["hi"]}]
    late, silent, well = await run_all(make(rows=rows, failed_reward=-1.0))
    assert [(t.error, t.reward) for t in (late, well)] == [(None, -1.0), (None, 4.0)]
    assert silent.error.startswith("program_silent: ") and silent.reward is None  # nothing of it is the policy's
    assert late.info["program"]["end"] == "program_crashed" and "end" not in well.info["program"]


@pytest.mark.parametrize("sandbox", WAYS)
async def test_the_reward_can_be_posted_or_in_a_file_or_computed(sandbox):
    (posted,) = await run_all(make(sandbox, rows=[{"texts": ["hi"], "how": "post"}], reward="post"))
    (filed,) = await run_all(make(sandbox, rows=[{"texts": ["hi"], "how": "file"}], reward="file"))
    (scored,) = await run_all(make(sandbox, reward="score", score="echo checked; wc -l < asks.py"))
    (missing,) = await run_all(make(sandbox, reward="file"))
    assert (posted.error, posted.reward) == (None, 7.0)
    assert (filed.error, filed.reward) == (None, 2.0)
    assert (scored.error, scored.reward) == (None, len((PROGRAMS / "asks.py").read_text().splitlines()))
    assert "reward.txt has no reward" in missing.error


async def test_much_output_is_not_kept_and_stops_nothing():
    (trajectory,) = await run_all(make(rows=[{"texts": ["hi"], "how": "noisy"}]))
    assert (trajectory.error, trajectory.reward_parts) == (None, {"length": 4.0})


@pytest.mark.parametrize("sandbox", WAYS)
async def test_the_example_can_be_in_a_file(sandbox):
    (trajectory,) = await run_all(make(sandbox, arguments=["{example}"], example="file"))
    assert (trajectory.error, trajectory.reward) == (None, 4.0)


async def test_a_sandbox_reaches_the_gateway_and_nothing_else_on_this_machine():
    async def answer(reader, writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    rows = [{"texts": ["hi"], "how": "look", "port": str(server.sockets[0].getsockname()[1])}]
    (inside,) = await run_all(make(True, rows=rows))
    (outside,) = await run_all(make(False, rows=rows))
    server.close()
    assert (inside.error, inside.reward, outside.reward) == (None, 0.0, 1.0)


def running(since):
    """Processes of the program that were started since then."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"asks.py" in (folder / "cmdline").read_bytes() and folder.stat().st_mtime >= since:
                found.append(folder.name)
        except OSError:
            continue  # it has ended
    return found


async def ended(since):
    """Wait until all that run now have ended; left alone, they run for days."""
    found = set(running(since))
    await until(lambda: not found & set(running(since)))


@pytest.mark.parametrize("sandbox", WAYS)
async def test_no_process_outlives_its_episode(sandbox, clock):
    began = time.time()
    await hung(sandbox, [{"texts": ["hi"], "how": "hang"}], clock)
    await ended(began)


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_daemon_does_not_outlive_the_episode(sandbox):
    began = time.time()
    (trajectory,) = await run_all(make(sandbox, rows=[{"texts": ["hi"], "how": "daemon"}]))
    assert (trajectory.error, trajectory.reward) == (None, 4.0)
    await ended(began)


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", WAYS)
async def test_what_a_program_leaves_behind_cannot_write_its_score(sandbox):
    """The scoring command waits until that is dead, or has written a hundred times more."""
    score = """\
size() { wc -c < "{work}/forged"; }
begun=$(size)
while kill -0 "$(cat "{work}/forger")" 2> /dev/null && [ "$(size)" -lt $((begun + 100)) ]; do sleep 0.01; done
echo 0.25"""
    rows = [{"texts": ["hi"], "how": "forges"}]
    (trajectory,) = await run_all(make(sandbox, rows=rows, reward="score", score=score))
    assert (trajectory.error, trajectory.reward) == (None, 0.25)


async def test_what_a_program_plants_in_its_home_is_not_run_by_the_scoring_command():
    rows = [{"texts": ["hi"], "how": "plants"}]
    (trajectory,) = await run_all(make(True, rows=rows, reward="score", score=f"{PYTHON} -c 'print(2.5)'"))
    assert (trajectory.error, trajectory.reward) == (None, 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_scoring_command_that_hangs_is_told_as_such(sandbox, monkeypatch):
    monkeypatch.setattr("verbatim.rollouts.gateway.program.environment.SCORE_SECONDS", 1.0)
    (trajectory,) = await run_all(make(sandbox, reward="score", score="echo 1; sleep 1000000"))
    assert trajectory.error == "environment: program: the scoring command did not end within 1 s"


def test_marked_processes_are_killed_and_no_others():
    def sleeper(mark):
        return subprocess.Popen(["sleep", "1000000"], env={VARIABLE: mark}, start_new_session=True)

    ours, other = sleeper("abc"), sleeper("abcd")
    try:
        for process in (ours, other):  # its variables are in /proc a little after it has begun
            wait_until(Path(f"/proc/{process.pid}/environ").read_bytes)
        assert kill_marked("abc") == 1
        assert ours.wait(HANGS) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_a_child_that_outlives_its_program_does_not_hold_the_episode():
    """The child holds the program's output for longer than the episode may take."""
    (trajectory,) = await run_all(make(rows=[{"texts": ["hi"], "how": "leaves"}]))
    assert (trajectory.error, trajectory.reward) == (None, len("5:hi"))


def test_a_sandbox_shows_the_folders_of_a_program_and_never_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _prefixes(str(tmp_path / "venv" / "bin" / "python")) == [tmp_path / "venv"]
    assert _prefixes(str(tmp_path / "bin" / "agent")) == [tmp_path / "bin"]
    assert _prefixes(str(tmp_path / "agent")) == [tmp_path / "agent"]
    assert _prefixes("/agent") == [Path("/agent")]


async def test_a_reused_program_that_cannot_be_started_takes_no_place(monkeypatch):
    programs = ReusedPrograms(make(reuse=True).launch, Service(), most=1, places=1)

    async def fails(self, key=""):
        raise OSError("no more processes")

    monkeypatch.setattr(ProgramProcess, "start", fails)
    for _ in range(2):
        async with asyncio.timeout(HANGS):
            with pytest.raises(OSError, match="no more processes"):
                await programs.take()


async def test_a_cut_off_or_refused_last_request_is_the_end():
    rows = [{"texts": ["hi", "x" * 6000], "how": "late"}, {"texts": ["x" * 6000], "how": "late"}]
    later, at_once = await run_all(make(rows=rows, failed_reward=0.0))
    assert (later.stop_reason, later.truncated, later.reward, later.error) == ("length", True, 0.0, None)
    assert later.info["gateway"]["counts"] == {"requests": 2}
    assert (at_once.stop_reason, at_once.truncated, at_once.reward) == ("length", True, None)
    assert at_once.error.startswith("no_turns: the policy sampled nothing, because its prompt of 6003 tokens")


class TestReuse:
    @pytest.mark.parametrize("sandbox", WAYS)
    async def test_few_processes_play_many_episodes(self, sandbox):
        rows = [{"id": str(n), "texts": ["a" * n, "b"]} for n in range(1, 9)]
        environment = make(sandbox, arguments=["--lines"], rows=rows, reuse=True, max_processes=2)
        trajectories = await run_all(environment)
        assert [t.error for t in trajectories] == [None] * 8
        assert all(len(t.turns) == 2 and len(build_samples(t)) == 1 for t in trajectories)
        assert {t.info["program"]["processes_started"] for t in trajectories} == {2}
        for n, trajectory in enumerate(trajectories, start=1):
            assert bytes(i for i in trajectory.turns[0].completion_ids if i < 256) == f"{n + 3}:{'a' * n}".encode()

    async def test_one_that_ends_or_hangs_is_replaced(self, clock):
        rows = [{"texts": ["hi"], "how": how} for how in ("crash", "", "hang", "", "error", "")]
        environment = make(arguments=["--lines"], rows=rows, reuse=True, max_processes=1, timeout=OWN)
        playing = asyncio.create_task(run_all(environment))
        await clock.until_said("hanging")
        clock.run_out(clock.own)  # of the one that plays; the others' have ended, or not begun
        trajectories = await playing
        kinds = [None if t.error is None else t.error.partition(":")[0] for t in trajectories]
        assert kinds == ["program_crashed", None, "program_hung", None, "program_crashed", None]
        assert "the program reported: no luck" in trajectories[4].error

    async def test_one_that_ends_after_its_answer_is_replaced(self):
        environment = make(
            arguments=["--lines"], rows=[{"texts": ["hi"], "how": "leaves later"}], reuse=True, max_processes=1
        )
        for number in (1, 2):
            (trajectory,) = await run_all(environment)
            assert (trajectory.error, trajectory.info["program"]["processes_started"]) == (None, number)
            (program,) = (await environment.serving()).reused._running
            await asyncio.wait_for(asyncio.wait([program.watching]), HANGS)  # it leaves after 0.1 s

    @staticmethod
    async def first_of_three(clock, until_file):
        """Three episodes and one place; the first of them has it until there is that file, and the others wait."""
        rows = [{"texts": ["hi"], "how": "held", "until": str(until_file)}] * 3
        environment = make(arguments=["--lines"], rows=rows, reuse=True, max_processes=1, timeout=OWN)
        playing = asyncio.create_task(run_all(environment))
        await until(lambda: len(clock.waiting) == 3)
        return playing

    async def test_waiting_for_a_place_takes_none_of_a_programs_own_time(self, tmp_path, clock):
        playing = await self.first_of_three(clock, tmp_path / "go")
        await clock.until_said("working on")
        assert len(clock.own) == 1
        (tmp_path / "go").touch()
        assert [t.error for t in await playing] == [None] * 3
        assert len(clock.own) == 3

    async def test_an_episode_that_finds_no_place_says_so_and_ends_no_other(self, tmp_path, clock):
        playing = await self.first_of_three(clock, tmp_path / "go")
        await clock.until_said("working on")
        clock.run_out(clock.waiting)
        await until(lambda: sum(limit.expired() for limit in clock.waiting) == 2)
        (tmp_path / "go").touch()
        first, *others = await playing
        assert first.error is None
        for trajectory in others:
            assert re.search(
                r"program: no place became free for it within \S+ s \(max_processes = 1 with "
                r"episodes_per_process = 1\)",
                trajectory.error,
            )
        assert first.info["program"]["processes_started"] == 1

    async def test_it_takes_neither_files_nor_scores(self):
        with pytest.raises(UsageError, match="examples and answers are lines"):
            make(reuse=True, example="file")


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({"command": []}, "the command is empty"),
            ({"command": "no-such-program x"}, "there is no program"),
            ({"cwd": "/no/such/folder"}, "is not a folder"),
            ({"reward": "score"}, "needs score = "),
            ({"unenforced": ["temperature"]}, "unenforced has 'temperature'"),
            ({"max_processes": 0}, "at least 1"),
        ],
    )
    def test_a_setting_that_does_not_fit_is_refused_early(self, args, said):
        given = {"command": [PYTHON, "asks.py"], "cwd": str(PROGRAMS), "data": [{"texts": ["hi"]}], "sandbox": False}
        with pytest.raises(UsageError, match=said):
            create_environment("program", {**given, **args})

    def test_a_folder_that_the_sandbox_cannot_show_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="its own /tmp"):
            make(True, visible=["/tmp/pytest"])

    async def test_there_are_no_demonstrations_without_a_file(self):
        from verbatim.core.errors import NoDemonstrations

        with pytest.raises(NoDemonstrations, match=r"args\.demonstrations"):
            make().demonstrations(1, 0)
        shown = make(demonstrations="guess_number").demonstrations(3, 0)
        assert [len(shown), shown[0].messages[0]["role"]] == [3, "system"]


def test_the_play_is_a_function_of_its_prompt():
    """What the other tests rely on."""
    ids = ByteRenderer().render_ids([{"role": "user", "content": "abc"}])
    (completion,) = [play(type("R", (), {"prompt_ids": ids})) for _ in range(1)]
    assert bytes(i for i in completion if i < 256) == b"6:abc" and isinstance(completion, np.ndarray)


@pytest.mark.parametrize("line", ["{}", '{"reward": {}}', "done", "true"])
def test_a_last_line_without_a_reward_is_none(line):
    with pytest.raises(EnvironmentFault, match=r"the last line has no reward.*expected a number"):
        read_reward(line, "the last line")
