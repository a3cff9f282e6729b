"""Short runs in which everything goes wrong that can, and a count of their tokens that the ledger has no part in.

The engine counts what it draws; `Counted`, around it, counts what each of its calls ended with. At every checkpoint and
at the end both have to be what the ledger says.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from byte_renderer import END, VOCAB_SIZE, call, say
from inference.step_gate import decoder_of
from run.orchestrator.loop_runs import Coins, FailingTrainer, FakeTrainer, Notes, make, until
from verbatim.core.errors import SamplerFault, VerbatimError
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.proxy import SamplerProxy
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits

CONTEXT = 160


@dataclass
class CampaignCounts:
    """What runs came to."""

    runs: int = 0
    drawn: int = 0
    """Tokens that the engines drew."""
    outside: int = 0
    """Tokens that are in no column of the ledger, or in one too many."""
    rolled_back: int = 0
    """Tokens of a process after the checkpoint that was gone on from: its own ledger had them, the run's has not."""
    outcomes: Counter = field(default_factory=Counter)
    """Tokens by what the ledger says of them in the end."""
    ends: Counter = field(default_factory=Counter)
    """Runs by how they ended."""
    errors: Counter = field(default_factory=Counter)
    """Failed episodes by kind."""

    def add(self, other: CampaignCounts) -> None:
        for name in ("runs", "drawn", "outside", "rolled_back"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("outcomes", "ends", "errors"):
            getattr(self, name).update(getattr(other, name))


# ---- samplers


class Breaking(ScriptedSampler):
    """Some requests fail after a few tokens, hang, or come back as what no engine can return."""

    def __init__(self, rng):
        self.rng = rng
        super().__init__(
            script=self._say,
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT,
            seconds_per_token=rng.choice([0.0, 0.0, 0.0005]),
            trouble=self._trouble,
        )
        self.share = rng.choice([0.0, 0.05, 0.2])

    def _say(self, request):
        return self.rng.choice(
            [
                say("x" * self.rng.randint(0, 12)),
                say("hm"),
                call("raises"),
                call("hangs"),
                call("done"),
                call("unknown"),
                [*call("done")[:-3], END],
                [*b"never ends"] * 9,
            ]
        )

    def _trouble(self, index, request):
        kinds = ["fail", "hang", "wrong_length", "outside_vocabulary", "nan"]
        return self.rng.choice(kinds) if self.rng.random() < self.share else None

    async def generate(self, request):
        if self.rng.random() < self.share:
            count = self.rng.randint(0, 6)
            for _ in range(count):
                await asyncio.sleep(0)
            self.num_drawn += count
            raise SamplerFault("broke in the middle", num_tokens=count)
        return await super().generate(request)


class Counted(SamplerProxy):
    """The count beside the ledger's: of every call that has ended, the tokens that were drawn for it."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.num_ended = 0

    async def generate(self, request):
        try:
            completion = await self._sampler.generate(request)
        except (asyncio.CancelledError, SamplerFault) as end:
            self.num_ended += getattr(end, "num_tokens", 0)
            raise
        self.num_ended += len(completion.ids)
        return completion

    async def update_weights(self, path, version):
        if isinstance(self._sampler, ScriptedSampler):
            await self._sampler.update_weights(path, version)
        else:
            await self._sampler._run_between_steps(lambda: decoder_of(self._sampler).set_version(version), vital=True)

    @property
    def num_drawn(self):
        """By the engine's own account."""
        engine = self._sampler
        return engine.num_drawn if isinstance(engine, ScriptedSampler) else engine.stats().sampled_tokens

    async def close(self):
        await self._sampler.close()


def tiny_model() -> Path:
    """A model with random weights over the byte renderer's ids, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="faulty-runs-"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=256,
        )
    ).save_pretrained(folder)
    return folder


def embedded(model, rng):
    """The engine itself; in some runs a sequence's logits are no numbers, or its thread fails."""
    sampler = TorchSampler(
        model,
        config=TorchSettings(max_batch_size=rng.choice([2, 4, 8]), prefill_chunk=64),
        context_length=CONTEXT,
        num_threads=1,
    )
    decoder, trouble = decoder_of(sampler), rng.random()
    if trouble < 0.3:
        logits = decoder.model.logits
        decoder.model.logits = lambda hidden: _spoil(logits(hidden), rng)
    elif trouble < 0.5:
        steps, step, last = iter(range(10**9)), decoder.step, rng.randint(20, 300)
        decoder.step = lambda: step() if next(steps) < last else 1 / 0
    return sampler


def _spoil(logits, rng):
    if rng.random() < 0.02:
        logits[rng.randrange(len(logits))] = float("nan")
    return logits


# ---- environments


class Trouble(Episode):
    """One way of going wrong, drawn from the episode's seed."""

    def __init__(self, seed, background):
        self.rng, self.background = random.Random(seed), background
        self.messages = [{"role": "user", "content": "go"}]
        self.tools = tuple(FunctionTool(tool, inline=True) for tool in (self.raises, self.hangs, self.done))
        kind = self.rng.choice(
            [
                None,
                None,
                "turns",
                "outlives",
                "insists",
                "cancels",
                "times_out",
                "group",
                "gather",
                "shields",
                "breaks",
                "sleeps",
            ]
        )
        if kind is not None:
            self.run = getattr(self, f"_{kind}")

    async def raises(self) -> str:
        """Raise."""
        raise RuntimeError("tool broke")

    async def hangs(self) -> str:
        """Hang."""
        await asyncio.sleep(60)
        return ""

    async def done(self) -> str:
        """End."""
        return "done"

    async def reply(self, message):
        return Reply(messages=[{"role": "user", "content": "and?"}], done=self.rng.random() < 0.5)

    async def score(self, trajectory):
        match self.rng.randrange(12):
            case 0:
                raise RuntimeError("no score")
            case 1:
                await asyncio.sleep(60)
            case 2:
                return None
        return float(self.rng.random() < 0.5)

    # -- what `run` may be

    def _say(self, agent, name="main"):
        return agent.sample([{"role": "user", "content": self.rng.choice(["a", "bc", "def"])}], agent=name)

    def _spawn(self, work):
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.background.append(task)
        return task

    async def _pause(self):
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.3:
            await asyncio.sleep(0.003)

    async def _turns(self, agent):
        messages = list(self.messages)
        for _ in range(self.rng.randint(1, 4)):
            messages += [await agent.sample(messages), {"role": "user", "content": "more"}]

    async def _outlives(self, agent):
        self._spawn(self._say(agent, "behind"))
        await self._pause()
        await self._say(agent)

    async def _insists(self, agent):
        async def insist():
            for _ in range(6):
                with contextlib.suppress(VerbatimError):
                    await self._say(agent, "insists")
                await asyncio.sleep(0.001)

        self._spawn(insist())
        await self._say(agent)

    async def _cancels(self, agent):
        siblings = [self._spawn(self._say(agent, f"sub/{k}")) for k in range(4)]
        await self._pause()
        for task in siblings[: self.rng.randint(1, 4)]:
            task.cancel()
            if self.rng.random() < 0.3:
                task.cancel()  # and once more
        await asyncio.gather(*siblings, return_exceptions=True)
        await self._say(agent)

    async def _times_out(self, agent):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.choice([0.0, 0.001, 0.004])):
                await self._say(agent, "slow")
        await self._say(agent)

    async def _group(self, agent):
        async def fails():
            await self._pause()
            raise RuntimeError("a sibling broke")

        async with asyncio.TaskGroup() as tasks:
            for k in range(3):
                tasks.create_task(self._say(agent, f"sub/{k}"))
            tasks.create_task(fails())

    async def _gather(self, agent):
        await asyncio.gather(*(self._say(agent, f"sub/{k}") for k in range(4)))

    async def _shields(self, agent):
        task = self._spawn(self._say(agent, "shielded"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.shield(task)

    async def _breaks(self, agent):
        await self._say(agent)
        raise RuntimeError("run broke")

    async def _sleeps(self, agent):
        self._spawn(self._say(agent, "beside"))
        await self._say(agent)
        await asyncio.sleep(60)


class Troubles(Coins):
    def __init__(self, salt):
        super().__init__()
        self.salt, self.background = salt, []

    async def start(self, example, seed):
        seed = random.Random(f"{self.salt} {seed}").getrandbits(60)
        if seed % 23 == 0:
            raise RuntimeError("start broke")
        return Trouble(seed, self.background)


# ---- runs


async def faulty_run(seed: int, model: Path | None, folder: Path) -> CampaignCounts:
    """One run and, where it was stopped or its trainer failed, another that goes on from its checkpoint.

    Args:
        seed: Of everything that is drawn.
        model: For the embedded engine; None takes the scripted one.
        folder: Where the trainer would write.
    """
    rng, episode_stats, notes, steps = (
        random.Random(seed),
        CampaignCounts(runs=1),
        Notes(),
        random.Random(seed).randint(2, 5),
    )
    settings = {
        "level": rng.choice([0, 1, 2]),
        "steps": steps,
        "interval": rng.choice([1, 2, 100]),
        "notes": notes,
        "oversampling": rng.choice([1.0, 1.0, 2.0]),
        "online_filtering": rng.random() < 0.3,
        "max_off_policy_steps": rng.choice([1, 8]),
        "max_length": rng.choice([40, CONTEXT]),
        "strategy": rng.choice(["interleaved", "branching"]),
        "environment": Troubles(seed),
        "limits": EpisodeLimits(
            max_turns=rng.choice([3, 8]),
            max_context=CONTEXT,
            timeout=rng.choice([0.03, 0.1]),
            tool_timeout=0.01,
            tool_error=rng.choice(["message", "stop"]),
        ),
        "params": SamplingParams(
            max_tokens=rng.choice([8, 40]), stop_token_ids=tuple(range(0, 256, 11)) if model is not None else ()
        ),
    }
    before: dict | None = None
    for attempt in range(3):
        engine = Breaking(rng) if model is None else embedded(model, rng)
        sampler = Counted(engine)
        fails = attempt == 0 and rng.random() < 0.25
        trainer = FailingTrainer(folder, at=rng.randint(2, 3)) if fails else FakeTrainer(folder, delay=0.001)
        orchestrator, _, _ = make(folder, sampler=sampler, trainer=trainer, **settings)
        ledger, known = orchestrator.ledger_for_tests, 0
        if before is not None:
            orchestrator.load_state_dict(before)
            known = before["counted"]
            await sampler.update_weights(folder, orchestrator.step)
        _count_beside(orchestrator, sampler, known, episode_stats)
        tokens = rng.randint(0, 800 if model is None else 40) if attempt == 0 and rng.random() < 0.4 else None
        end = await _run_until(orchestrator, sampler, tokens)
        await sampler.close()
        await _end_of(settings["environment"].background)
        counted = known + sampler.num_drawn
        episode_stats.drawn += sampler.num_drawn
        episode_stats.outside += abs(counted - ledger.sampled) + abs(sampler.num_drawn - sampler.num_ended)
        pending = orchestrator.dispatcher.num_pending_tokens
        ledger.check(pending)
        episode_stats.ends[end] += 1
        if end == "finished" or attempt == 2:
            break
        before = notes.saved[max(notes.saved)]
        notes.steps = [entry for entry in notes.steps if entry[0] <= before["step"]]
        episode_stats.rolled_back += ledger.sampled - before["ledger"]["sampled"]
    episode_stats.outcomes.update({"trained": ledger.trained, **ledger.dropped, "pending": pending})
    for _, _, groups in notes.steps:
        episode_stats.errors.update(t.error.partition(":")[0] for g in groups for t in g.trajectories if t.error)
    return episode_stats


def _count_beside(orchestrator, sampler, known, episode_stats):
    """Whenever the loop's state is taken, what has been counted until then is in it too."""
    state_dict, ledger = orchestrator.state_dict, orchestrator.ledger_for_tests

    def with_count():
        counted = known + sampler.num_ended
        episode_stats.outside += abs(counted - ledger.sampled)
        return {**state_dict(), "counted": counted}

    orchestrator.state_dict = with_count


async def _run_until(orchestrator, sampler, tokens):
    """How the run ended; when the engine has drawn so many tokens, it is asked to stop."""
    running = asyncio.ensure_future(orchestrator.run())
    if tokens is not None:
        await until(lambda: sampler.num_drawn >= tokens or running.done())
        orchestrator.request_stop()
    try:
        return "finished" if await running else "stopped"
    except VerbatimError as error:
        return type(error).__name__


async def _end_of(background):
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    background.clear()
