"""Every episode that any test plays is held against what its sampler returned: ids, logprobs, versions, samples.

While installed, each turn that an `AgentLoop` takes is written down where the sampler hands it over. Then

- the turn is read once more from the ids that were recorded: the same message, the same calls;
- its prompt is made once more, bridged from recorded ids or rendered: the same ids;
- when the episode ends, its turns are the sampler's own stream, and so are its training samples: each recorded token
  trained in one of them, with its logprob and version, behind the very ids of its prompt; where every prompt extends
  the turn before, in a single sample that is the stream.

What does not hold is collected, since an episode keeps whatever is raised inside of it to itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np

from verbatim import Trajectory, build_samples
from verbatim.inference.sampler import Completion
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.loop import Prompt, SampledAnswer
from verbatim.rollouts.recorder import Recorder


@dataclasses.dataclass
class Told:
    """One turn as the sampler was asked for it and answered."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None
    versions: list[int] | None
    trained: bool


@dataclasses.dataclass
class Watch:
    """What was seen."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    num_episodes: int = 0

    def expect(self, holds: bool, what: str) -> None:
        """Remember what does not hold."""
        if not holds:
            self.wrong.append(what)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch all episodes for as long as the block lasts."""
    watch = Watch()
    streams: dict[Recorder, list[Told]] = {}
    read, record, make_prompt, close = AgentLoop._read, AgentLoop._record, AgentLoop._conversation, Recorder.close
    amend = Recorder.amend
    replied = AgentLoop._replied
    completions: dict[SampledAnswer, Completion] = {}
    cut: set[SampledAnswer] = set()

    def prompt_again(loop: AgentLoop, prompt: Prompt) -> Any:
        made = make_prompt(loop, prompt)
        if not made.extends:
            again = loop.renderer.render_ids(prompt.messages, prompt.schemas or None, add_generation_prompt=True)
        else:
            before = prompt.thread.answer.conversation
            turn = loop.recorder.turns[prompt.thread.turn]  # other arrays, and nothing that was read before
            handle = dataclasses.replace(
                before, messages=prompt.messages[: prompt.num_known - 1], prompt_ids=turn.prompt_ids
            ).answered(turn.completion_ids, None, before.said.message, before.said.calls)
            again = handle.continued(prompt.messages[prompt.num_known :], prompt.schemas or None).prompt_ids
        same = np.array_equal(again, made.prompt_ids)
        watch.expect(same, f"{prompt.agent}: the prompt, made again from what was recorded, has other ids")
        return made

    def read_and_keep(loop: AgentLoop, completion: Completion, *how: Any) -> SampledAnswer:
        answer = read(loop, completion, *how)
        completions[answer] = completion
        text = loop.renderer.decode(completion.ids)
        if any(stop in text for stop in how[2].stop):
            cut.add(answer)  # its message ends before the stop string
        return answer

    def reply_and_keep(loop: AgentLoop, reply: Any, completion: Completion, *how: Any) -> SampledAnswer:
        answer = replied(loop, reply, completion, *how)
        size = len(reply.ids)
        watch.expect(np.array_equal(reply.ids, completion.ids[:size]), "a reply has other ids than its completion")
        kept = {
            name: None if (values := getattr(completion, name)) is None else values[:size]
            for name in ("ids", "logprobs", "policy_versions")
        }
        completions[answer] = dataclasses.replace(completion, **kept)
        is_short = size < len(completion.ids) or reply.stop_string is not None
        if is_short or any(call.status != "ok" for call in reply.tool_calls):
            cut.add(answer)  # its message is not what its ids say
        return answer

    def record_again(loop: AgentLoop, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        index = record(loop, answer, prompt, state_key)
        completion = completions.pop(answer)
        stream = streams.setdefault(loop.recorder, [])
        stream.append(
            Told(
                prompt=np.asarray(answer.prompt_ids).tolist(),
                completion=np.asarray(completion.ids).tolist(),
                logprobs=_listed(completion.logprobs),
                versions=_listed(completion.policy_versions),
                trained=prompt.trained,
            )
        )
        watch.num_turns += 1
        if answer in cut:
            cut.remove(answer)
            return index
        turn = loop.recorder.turns[index]
        again = loop.renderer.parse_response(turn.completion_ids, turn.prompt_ids, prompt.schemas or None)
        said = dataclasses.replace(again, tool_calls=answer.tool_calls).message()
        unnamed = [_without_id(call) for call in again.tool_calls]
        watch.expect(
            said == answer.message and unnamed == [_without_id(call) for call in answer.tool_calls],
            f"turn {index}, read again from the recorded ids, says {again}; it said {answer.message}",
        )
        return index

    def amend_and_keep(recorder: Recorder, index: int, **changes: Any) -> None:
        amend(recorder, index, **changes)
        if "trained" in changes and recorder in streams:
            streams[recorder][index].trained = changes["trained"]

    def check_and_close(recorder: Recorder) -> None:
        close(recorder)
        if recorder in streams:
            watch.num_episodes += 1
            _compare(watch, recorder, streams.pop(recorder))

    with (
        mock.patch.object(AgentLoop, "_read", read_and_keep),
        mock.patch.object(AgentLoop, "_replied", reply_and_keep),
        mock.patch.object(AgentLoop, "_record", record_again),
        mock.patch.object(AgentLoop, "_conversation", prompt_again),
        mock.patch.object(Recorder, "amend", amend_and_keep),
        mock.patch.object(Recorder, "close", check_and_close),
    ):
        yield watch


def _compare(watch: Watch, recorder: Recorder, stream: list[Told]) -> None:
    """The turns of an episode and their samples, against what the sampler returned.

    Turns that were under way side by side are recorded as they end, which is the order of the stream too.
    """
    turns = recorder.turns
    where = f"an episode of {len(turns)} turns"
    watch.expect(len(turns) == len(stream), f"{where}: {len(turns)} turns recorded, {len(stream)} sampled")
    for index, (turn, told) in enumerate(zip(turns, stream, strict=False)):
        recorded = (turn.prompt_ids.tolist(), turn.completion_ids.tolist(), _listed(turn.logprobs))
        watch.expect(recorded[:2] == (told.prompt, told.completion), f"{where}, turn {index}: other ids")
        watch.expect(_same(recorded[2], told.logprobs), f"{where}, turn {index}: other logprobs")
    samples = build_samples(Trajectory(example_id="x", turns=tuple(turns)))
    found: dict[int, tuple[list[int], list[int], list[float], list[int]]] = {}
    for sample in samples:
        for index in np.unique(sample.chunk_ids[sample.loss_mask]).tolist():
            places = np.flatnonzero(sample.chunk_ids == index)
            watch.expect(index not in found, f"{where}: turn {index} is trained in two samples")
            found[index] = (
                sample.token_ids[: places[0]].tolist(),
                sample.token_ids[places].tolist(),
                sample.logprobs[places].tolist(),
                sample.policy_versions[places].tolist(),
            )
    for index, told in enumerate(stream):
        trained = found.pop(index, None)
        if not told.trained or told.logprobs is None or not told.completion or not told.prompt:
            watch.expect(trained is None, f"{where}: turn {index} is trained, but was not to be, or has no logprobs")
            continue
        expected = (told.prompt, told.completion, told.logprobs)
        watch.expect(
            trained is not None
            and trained[:2] == expected[:2]
            and _same(trained[2], expected[2])
            and (told.versions is None or trained[3] == told.versions),
            f"{where}: turn {index} is not trained as it was sampled",
        )
    watch.expect(not found, f"{where}: trained tokens that nobody sampled, of turns {sorted(found)}")
    extends = all(_begins(b.prompt, [*a.prompt, *a.completion]) for a, b in pairwise(stream))
    has_trained = any(told.trained and told.logprobs is not None for told in stream)
    if extends and len({turn.agent for turn in turns}) == 1 and has_trained:
        whole = [*stream[-1].prompt, *stream[-1].completion]
        ids = [sample.token_ids.tolist() for sample in samples]
        watch.expect(len(ids) == 1 and _begins(whole, ids[0]), f"{where}: unbroken, but not one sample of its stream")


def _listed(values: Any) -> list[Any] | None:
    return None if values is None else np.asarray(values).tolist()


def _same(a: list[float] | None, b: list[float] | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(np.asarray(a, dtype=np.float32), np.asarray(b, dtype=np.float32), equal_nan=True)


def _begins(whole: list[int], start: list[int]) -> bool:
    return whole[: len(start)] == start


def _without_id(call: Any) -> Any:
    return dataclasses.replace(call, id="")
