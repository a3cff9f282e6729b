"""Opening prompts are measured as a run would ask for them, of every example, within a time; and nothing is sampled."""

import itertools

import pytest

from byte_renderer import ByteRenderer, text
from verbatim import Example
from verbatim.core.errors import EnvironmentFault
from verbatim.environments.environment import Episode
from verbatim.environments.tools import FunctionTool
from verbatim.rollouts.openings import measure_openings


def look(key: str) -> str:
    """Look something up."""
    return key


class Asked(Episode):
    closed = 0

    def __init__(self, characters):
        self.messages = [{"role": "user", "content": "x" * characters}]

    async def close(self):
        Asked.closed += 1

    async def score(self, trajectory):
        raise AssertionError("nothing was sampled")


class Owning(Asked):
    async def run(self, agent):
        await agent.sample(self.messages, agent="sub/1")


class Rendering(Asked):
    async def run(self, agent):
        await agent.complete(text("x" * 33), None)


class Sizes:
    def __init__(self, *characters, kind=Asked):
        self.characters, self.kind, self.started = characters, kind, []

    def examples(self, split):
        return [Example(id=f"e{n}", payload={"characters": size}) for n, size in enumerate(self.characters)]

    async def start(self, example, seed):
        self.started.append(example.id)
        return self.kind(example.payload["characters"])


async def measured(environment, **how):
    how = {"seq_len": 40, "renderer": ByteRenderer(), **how}
    return await measure_openings(environment, environment.examples("train"), **how)


@pytest.mark.parametrize("kind", [Asked, Owning])
async def test_the_examples_that_leave_no_room_are_named_with_their_tokens(kind):
    """`ByteRenderer` writes three ids beside the characters; a context of 40 tokens needs a prompt of at most 39."""
    Asked.closed = 0
    found = await measured(Sizes(2, 37, 36, 60, kind=kind))
    assert (found.num_measured, dict(found.too_long)) == (4, {"e1": 40, "e3": 63})
    assert found.found == (
        "the opening prompts of 2 of 4 examples leave no room in seq_len = 40, tools included: 'e1' "
        "(40 tokens), 'e3' (63 tokens)"
    )
    assert (found.left_out, found.none_fits, Asked.closed) == (None, False, 4)
    assert (await measured(Sizes(37, 60, kind=kind))).none_fits


async def test_exact_ids_of_an_environment_are_counted_as_they_are():
    assert dict((await measured(Sizes(1, kind=Rendering), seq_len=33)).too_long) == {"e0": 33}


async def test_without_a_renderer_four_characters_are_a_token_and_tools_count():
    assert dict((await measured(Sizes(160, 159), renderer=None)).too_long) == {"e0": 40}

    class Tooled(Asked):
        tools = (FunctionTool(look, inline=True),)

    found = await measured(Sizes(2, kind=Tooled), renderer=None)
    assert found.too_long["e0"] > 40 and "about" in found.found
    assert not found.none_fits  # an estimate refuses nothing


async def test_what_is_not_measured_is_said_with_the_reason():
    class Broken(Sizes):
        async def start(self, example, seed):
            if example.id == "e1":
                raise EnvironmentFault("the shop is closed")
            return await super().start(example, seed)

    found = await measured(Broken(2, 2, 2))
    assert found.left_out.startswith("the opening prompts of 1 of 3 examples were not measured: example 'e1': ")
    assert found.left_out.endswith("the shop is closed")
    assert not found.none_fits


async def test_what_takes_longer_is_left_out():
    ticks = itertools.count()
    environment = Sizes(*[60] * 100)
    found = await measured(environment, seconds=30.0, clock=lambda: float(next(ticks)))
    assert found.num_measured == len(environment.started) == 29  # one look at the clock begins, the 30th is too late
    assert found.left_out.startswith(
        "the opening prompts of 71 of 100 examples were not measured: the time limit of 30 s was reached"
    )


@pytest.mark.parametrize("kind", [Asked, Owning])
async def test_a_first_prompt_that_cannot_be_rendered_begins_no_episode(kind):
    class Strict(ByteRenderer):
        def render_ids(self, *given, **more):
            raise EnvironmentFault("messages are text only")

    found = await measured(Sizes(2, 3, kind=kind), renderer=Strict())
    assert (found.cannot_begin, found.num_measured) == (True, 0)
    assert found.first_fault == "example 'e0': environment: messages are text only"


async def test_one_that_fits_is_enough_and_is_looked_for_in_order():
    environment = Sizes(60, 60, 2, 2, 60)
    found = await measured(environment, until_one_fits=True)
    assert environment.started == ["e0", "e1", "e2"]
    assert (found.none_fits, found.cannot_begin) == (False, False)
    assert (await measured(Sizes(60, 60), until_one_fits=True)).none_fits


async def test_an_environment_that_only_a_run_can_play_is_given_up_soon():
    class Refusing(Asked):
        async def run(self, agent):
            raise EnvironmentFault("only for the run's sampler")

    environment = Sizes(*[2] * 100, kind=Refusing)
    found = await measured(environment)
    assert (found.num_measured, len(environment.started) <= 8 + 16) == (0, True)
    assert found.left_out.endswith("example 'e0': environment: only for the run's sampler")
    assert not found.cannot_begin
