"""Programs as environments: each run of one is an episode; what goes wrong in it is data under its own reason."""

import asyncio
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from scripted_gateway import play

from byte_renderer import VOCAB_SIZE, ByteRenderer
from verbatim import build_samples
from verbatim.environments.resolve import create_environment
from verbatim.errors import EnvironmentFault, UsageError
from verbatim.gateway.program.launch import _prefixes
from verbatim.gateway.program.leftovers import VARIABLE, kill_marked
from verbatim.gateway.program.process import ProgramProcess
from verbatim.gateway.program.reused import ReusedPrograms
from verbatim.gateway.program.rewards import read_reward
from verbatim.gateway.service import Service
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = "/usr/bin/python3"
"""One that every user can run, also the sandbox's."""
PATIENCE = (3, 12, 48)
"""Seconds for what a program does before it hangs: more of them where the machine stood still for the first ones."""
WAYS = [pytest.param(False, id="plain"), pytest.param(True, id="sandbox")]


def make(sandbox=False, script="asks.py", arguments=(), rows=({"texts": ["hi"]},), **args):
    return create_environment("program", {
        "command": [PYTHON, script, *arguments], "cwd": str(PROGRAMS), "data": list(rows), "sandbox": sandbox, **args
    })  # fmt: skip


def sampler(**options):
    return ScriptedSampler(script=play, vocab_size=VOCAB_SIZE, context_length=10_000, **options)


async def run_all(environment, engine=None, episode_timeout=60.0):
    """One trajectory of each example, all at once."""
    setup = RolloutSetup(
        env="program", environment=environment, sampler=engine or sampler(), renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=100), slots=asyncio.Semaphore(64),
        limits=EpisodeLimits(max_turns=8, max_context=5000, timeout=episode_timeout),
    )  # fmt: skip
    runs = [GroupRun(setup, example, index=n, size=1, run_seed=0).run()
            for n, example in enumerate(environment.examples("train"))]  # fmt: skip
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
        turn.prompt_ids.tobytes() for t in (one, two) for turn in t.turns)  # fmt: skip
    assert two.info["program"]["status"] == 0
    assert 0 < two.info["program"]["seconds_to_first_request"] < two.info["program"]["seconds"]
    assert [m["role"] for m in two.messages] == ["user", "assistant"] * 3


async def hung(sandbox, rows):
    """The trajectory of a program that hangs, and its seconds: enough of them for its request before."""
    for seconds in PATIENCE:
        (trajectory,) = await run_all(make(sandbox, rows=rows, timeout=float(seconds)), episode_timeout=600.0)
        if "waiting" in trajectory.error:
            break
    return trajectory, seconds


@pytest.mark.parametrize("sandbox", WAYS)
@pytest.mark.parametrize(("how", "kind", "said"), [
    ("crash", "program_crashed", "exit status 1; it said 'it broke'"), ("late", "program_crashed", "exit status 3"),
    ("silent", "program_silent", "without a request"), ("kill", "program_crashed", "exit status 137"),
    ("hang", "program_hung", None),
    ("no reward", "environment", "the last line has no reward: found 'done'"),
])  # fmt: skip
async def test_what_goes_wrong_is_counted_under_its_own_reason(sandbox, how, kind, said):
    rows = [{"texts": ["hi"], "how": how}]
    if how == "hang":
        trajectory, seconds = await hung(sandbox, rows)
        said = f"no end after {seconds} s; so far it said 'waiting'"
    else:
        (trajectory,) = await run_all(make(sandbox, rows=rows))
    assert trajectory.error.startswith(f"{kind}: ") and said in trajectory.error
    assert trajectory.reward is None
    assert len(trajectory.turns) == (how not in ("crash", "silent"))


async def test_a_failure_can_have_a_reward():
    rows = [{"texts": ["hi"], "how": "late"}, {"texts": ["hi"], "how": "silent"}, {"texts": ["hi"]}]
    late, silent, well = await run_all(make(rows=rows, failed_reward=-1.0))
    assert [(t.error, t.reward) for t in (late, silent, well)] == [(None, -1.0), (None, -1.0), (None, 4.0)]
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
    """Wait until all that run now have ended; left alone, they run for 1000 s."""
    found = set(running(since))
    async with asyncio.timeout(60):
        while found & set(running(since)):  # noqa: ASYNC110 - the system sets no event
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("sandbox", WAYS)
async def test_no_process_outlives_its_episode(sandbox):
    began = time.time()
    await hung(sandbox, [{"texts": ["hi"], "how": "hang"}])
    await ended(began)


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_daemon_does_not_outlive_the_episode(sandbox):
    began = time.time()
    (trajectory,) = await run_all(make(sandbox, rows=[{"texts": ["hi"], "how": "daemon"}]))
    assert (trajectory.error, trajectory.reward) == (None, 4.0)
    await ended(began)


@pytest.mark.parametrize("sandbox", WAYS)
async def test_what_a_program_leaves_behind_cannot_write_its_score(sandbox):
    rows = [{"texts": ["hi"], "how": "forges"}]
    (trajectory,) = await run_all(make(sandbox, rows=rows, reward="score", score="sleep 0.5; echo 0.25"))
    assert (trajectory.error, trajectory.reward) == (None, 0.25)


async def test_what_a_program_plants_in_its_home_is_not_run_by_the_scoring_command():
    rows = [{"texts": ["hi"], "how": "plants"}]
    (trajectory,) = await run_all(make(True, rows=rows, reward="score", score=f"{PYTHON} -c 'print(2.5)'"))
    assert (trajectory.error, trajectory.reward) == (None, 2.5)


@pytest.mark.parametrize("sandbox", WAYS)
async def test_a_scoring_command_that_hangs_is_told_as_such(sandbox, monkeypatch):
    monkeypatch.setattr("verbatim.gateway.program.environment.SCORE_SECONDS", 1.0)
    (trajectory,) = await run_all(make(sandbox, reward="score", score="echo 1; sleep 50"))
    assert trajectory.error == "environment: program: the scoring command did not end within 1 s"


def test_marked_processes_are_killed_and_no_others():
    def sleeper(mark):
        return subprocess.Popen(["sleep", "600"], env={VARIABLE: mark}, start_new_session=True)

    ours, other = sleeper("abc"), sleeper("abcd")
    try:
        assert kill_marked("abc") == 1
        assert ours.wait(60) == -9
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
        async with asyncio.timeout(60):
            with pytest.raises(OSError, match="no more processes"):
                await programs.take()


async def test_a_cut_off_or_refused_last_request_is_the_end():
    (trajectory,) = await run_all(make(rows=[{"texts": ["x" * 6000], "how": "late"}], failed_reward=0.0))
    assert (trajectory.stop_reason, trajectory.truncated, trajectory.reward) == ("length", True, 0.0)
    assert trajectory.info["gateway"]["counts"] == {"requests": 1}


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

    async def test_one_that_ends_or_hangs_is_replaced(self):
        rows = [{"texts": ["hi"], "how": how} for how in ("crash", "", "hang", "", "error", "")]
        for seconds in PATIENCE:
            environment = make(arguments=["--lines"], rows=rows, reuse=True, max_processes=1, timeout=float(seconds))
            trajectories = await run_all(environment, episode_timeout=600.0)
            if sum("hung" in (t.error or "") for t in trajectories) == 1:
                break
        kinds = [None if t.error is None else t.error.partition(":")[0] for t in trajectories]
        assert kinds == ["program_crashed", None, "program_hung", None, "program_crashed", None]
        assert "the program said: no luck" in trajectories[4].error

    async def test_one_that_ends_after_its_answer_is_replaced(self):
        environment = make(arguments=["--lines"], rows=[{"texts": ["hi"], "how": "leaves later"}], reuse=True,
                           max_processes=1)  # fmt: skip
        for number in (1, 2):
            (trajectory,) = await run_all(environment)
            assert (trajectory.error, trajectory.info["program"]["processes_started"]) == (None, number)
            (program,) = (await environment.serving()).reused._running
            await asyncio.wait_for(asyncio.wait([program.watching]), 60)  # it leaves after 0.1 s

    async def test_waiting_for_a_place_takes_none_of_a_programs_own_time(self):
        for seconds in PATIENCE:
            rows = [{"texts": ["hi"], "how": "slow", "seconds": seconds / 2}] * 3
            environment = make(arguments=["--lines"], rows=rows, reuse=True, max_processes=1, timeout=float(seconds))
            errors = [t.error for t in await run_all(environment, episode_timeout=600.0)]
            if errors == [None] * 3:
                break
        assert errors == [None] * 3  # the last one has waited for all of `seconds`

    async def test_an_episode_that_finds_no_place_says_so_and_ends_no_other(self):
        for seconds, limit in ((4.8, "3.84"), (19.2, "15.4"), (80.0, "75")):  # for a program and its wait
            rows = [{"texts": ["hi"], "how": "slow", "seconds": seconds / 2.4}] * 3
            environment = make(arguments=["--lines"], rows=rows, reuse=True, max_processes=1)
            trajectories = await run_all(environment, episode_timeout=seconds)
            errors = [t.error for t in trajectories]
            said = f"there was no place for it within {limit} s (max_processes = 1 with episodes_per_process = 1)"
            if errors[0] is None and said in errors[2]:
                break
        assert errors[0] is None
        assert f"program: {said}" in errors[2]
        assert {t.info["program"]["processes_started"] for t in trajectories[:1]} == {1}

    async def test_it_takes_neither_files_nor_scores(self):
        with pytest.raises(UsageError, match="reads its examples from lines"):
            make(reuse=True, example="file")


class TestRefusals:
    @pytest.mark.parametrize(("args", "said"), [
        ({"command": []}, "the command is empty"), ({"command": "no-such-program x"}, "there is no program"),
        ({"cwd": "/no/such/folder"}, "is no folder"), ({"reward": "score"}, "belong together"),
        ({"unenforced": ["temperature"]}, "unenforced has 'temperature'"), ({"max_processes": 0}, "at least 1"),
    ])  # fmt: skip
    def test_a_setting_that_does_not_fit_is_refused_early(self, args, said):
        given = {"command": [PYTHON, "asks.py"], "cwd": str(PROGRAMS), "data": [{"texts": ["hi"]}], "sandbox": False}
        with pytest.raises(UsageError, match=said):
            create_environment("program", {**given, **args})

    def test_a_folder_that_the_sandbox_cannot_show_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="a /tmp of its own"):
            make(True, visible=["/tmp/pytest"])

    async def test_there_are_no_demonstrations_without_a_file(self):
        from verbatim.errors import NoDemonstrations

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
