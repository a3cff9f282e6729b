"""Long conversations are rendered on a thread, so that the event loop turns meanwhile."""

import asyncio
import threading

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim.core.errors import EnvironmentFault, RecordError
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder
from verbatim.rollouts.loop import EpisodeOver
from waiting import HANGS

pytestmark = pytest.mark.realtime

SHORT = [{"role": "user", "content": "hi"}]
MANY = [{"role": "user", "content": "hi"}] * 129
MUCH = [{"role": "user", "content": "x" * 50_001}]


class Watched(ByteRenderer):
    """Remembers the threads that it ran on; waits until it may go on in those beside the event loop."""

    thread_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.threads = []
        self.loop, self.began = asyncio.get_running_loop(), asyncio.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def render_ids(self, messages, tools=None, add_generation_prompt=True):
        self._note()
        return super().render_ids(messages, tools, add_generation_prompt)

    def bridge_to_next_turn(self, *given):
        self._note()
        return super().bridge_to_next_turn(*given)

    def _note(self):
        is_loop = threading.current_thread() is threading.main_thread()
        self.threads.append("loop" if is_loop else "other")
        self.loop.call_soon_threadsafe(self.began.set)
        assert is_loop or self.may_go_on.wait(HANGS)


def loop_of(renderer, **limits):
    sampler = ScriptedSampler(script=lambda request: say("yo"), vocab_size=VOCAB_SIZE, context_length=200_000)
    limits = EpisodeLimits(**{"max_context": 200_000, **limits})
    recorder = Recorder(VOCAB_SIZE)
    return AgentLoop(
        sampler=sampler, renderer=renderer, params=SamplingParams(), limits=limits, recorder=recorder, seed=1
    ), recorder


@pytest.mark.parametrize(("messages", "thread"), [(SHORT, "loop"), (MANY, "other"), (MUCH, "other")])
async def test_what_is_long_is_rendered_and_bridged_on_a_thread(messages, thread):
    renderer = Watched()
    loop, recorder = loop_of(renderer)
    said = await loop.sample(messages)
    await loop.sample([*messages, said, *SHORT])
    assert set(renderer.threads) == {thread}
    plain = ByteRenderer()
    first = plain.render_ids(messages)
    assert recorder.turns[0].prompt_ids.tolist() == first.tolist()
    assert recorder.turns[1].prompt_ids.tolist() == plain.render_ids([*messages, said, *SHORT]).tolist()
    assert recorder.turns[1].extends(recorder.turns[0])


async def test_a_renderer_that_does_not_say_so_stays_on_the_loop():
    renderer = Watched()
    renderer.thread_safe = False
    loop, _ = loop_of(renderer)
    await loop.sample(MANY)
    assert set(renderer.threads) == {"loop"}


async def test_the_loop_turns_while_a_long_conversation_is_rendered_and_limits_hold():
    renderer = Watched()
    loop, recorder = loop_of(renderer, max_turns=1)
    renderer.may_go_on.clear()
    long = asyncio.ensure_future(loop.sample(MANY, agent="long"))
    await asyncio.wait_for(renderer.began.wait(), HANGS)  # it turns
    await loop.sample(SHORT, agent="other")  # the last turn
    renderer.may_go_on.set()
    with pytest.raises(EpisodeOver, match="max_turns"):
        await long
    assert len(recorder.turns) == 1


async def test_a_prompt_that_comes_after_the_end_is_not_sampled_from():
    renderer = Watched()
    loop, recorder = loop_of(renderer)
    renderer.may_go_on.clear()
    long = asyncio.ensure_future(loop.sample(MANY))
    await asyncio.wait_for(renderer.began.wait(), HANGS)
    await loop.end()
    recorder.close()
    renderer.may_go_on.set()
    with pytest.raises(RecordError, match="after the episode had ended"):
        await long
    assert recorder.late is None  # it began before the end
    assert recorder.num_sampled_tokens == 0


async def test_what_is_no_message_is_refused_however_many_there_are():
    class Strict(Watched):
        def render_ids(self, messages, tools=None, add_generation_prompt=True):
            raise EnvironmentFault("message 0 is of type int")

    loop, _ = loop_of(Strict())
    with pytest.raises(EnvironmentFault, match="message 0"):
        await loop.sample([1] * 129)
    with pytest.raises(EnvironmentFault, match="message 0"):
        await loop.sample([{"role": "user", "content": 3}])
