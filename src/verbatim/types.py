"""The records that travel down the line, from an example to a micro-batch.

All are frozen; ids are int32 arrays, logprobs float32. Bad data is refused where it enters, with a
`RecordError` that names turn and position; nothing downstream checks it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, NotRequired, Required, TypeAlias, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from verbatim import token_tree
from verbatim.errors import NoFlatList, RecordError
from verbatim.token_tree import LARGEST_ID, Segment, TokenPath, TokenTree, as_ids

Ids: TypeAlias = token_tree.Ids
Int32: TypeAlias = token_tree.Int32
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]

MAX_POSITIVE_LOGPROB = 1e-4
"""Rounding may leave a logprob this far above 0; it is stored as 0. Anything above is refused."""


class FunctionCall(TypedDict):
    """The function part of a tool call, as OpenAI's chat format has it."""

    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(TypedDict, total=False):
    """A tool call inside an assistant message, as OpenAI's chat format has it."""

    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict):
    """One chat message, as OpenAI's chat format has it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class StopReason(StrEnum):
    """Why a completion, or a trajectory, ended (reference table in docs/rollouts.md)."""

    STOP = "stop"
    LENGTH = "length"
    MAX_TURNS = "max_turns"
    API_ERROR = "api_error"
    CANCELLED = "cancelled"
    MALFORMED = "malformed"

    @property
    def truncated(self) -> bool:
        """Whether something was cut off: everything but a natural stop."""
        return self is not StopReason.STOP


ParseStatus: TypeAlias = Literal["ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure",
                                 "unknown_tool", "invalid_arguments"]  # fmt: skip
PARSE_STATUSES: tuple[str, ...] = get_args(ParseStatus)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One attempt of the model to call a tool, well-formed or not."""

    name: str | None
    """The function's name; None where it could not be read."""
    arguments: Mapping[str, Any] | None
    """The parsed arguments; None where they could not be read."""
    status: ParseStatus = "ok"
    """"ok", or what is wrong with it."""
    raw: str = ""
    """The text between the call's delimiters, as sampled."""
    id: str = ""
    """Identifies the call inside its trajectory; the tool message answers to it."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of a data set. Which example a rollout is about, and what its environment needs to start it."""

    id: str
    """Unique inside its environment."""
    env: str = ""
    """The name of its environment."""
    messages: tuple[Message, ...] = ()
    """Opening messages, where the data set has them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas, where the data set has them."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the environment needs (the secret, the answer, ...). JSON values."""


@dataclass(frozen=True, kw_only=True)
class TurnTiming:
    """Wall-clock seconds of one turn."""

    queued: float = 0.0
    """From the request to the first prompt token processed."""
    generated: float = 0.0
    """From there to the last sampled token."""
    tools: float = 0.0
    """In tools and environment after the completion."""


class _PromptIds:
    """Reads a turn's prompt back from where it is stored."""

    def __get__(self, turn: Turn | None, owner: type) -> Int32:
        if turn is None:
            raise AttributeError("prompt_ids")  # tells dataclass that there is no default
        return turn.path.ids(turn.num_prompt_tokens)

    def __set__(self, turn: Turn, value: Ids | TokenPath) -> None:
        object.__setattr__(turn, "path", value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One model request and its response, as exact ids.

    Raises:
        RecordError: lengths that do not match, ids that are no ids, a logprob that is NaN, infinite or above 0, a
            reward or an advantage that is not one number.
    """

    prompt_ids: Int32 = _PromptIds()  # type: ignore[assignment]
    """The exact ids that were sent: int32 [P]. Reading them makes an array; what is stored is `path`. Instead of ids, a
    path that ends with the completion is taken as it is."""
    completion_ids: Int32
    """The exact ids that came back, the stop token included: int32 [C]."""
    logprobs: Float32 | None = None
    """Of each completion id, under the distribution that was sampled from: float32 [C]; None = missing."""
    policy_versions: Int32 | None = None
    """The policy version that sampled each completion id: int32 [C]; None = unknown."""
    stop_reason: StopReason = StopReason.STOP
    """Why the completion ended."""
    temperature: float = 1.0
    """The temperature it was sampled at."""
    reward: float | None = None
    """The turn's own reward; None if it has none."""
    advantage: float | None = None
    """The advantage of this turn's tokens; None inherits the trajectory's."""
    state_key: str | None = None
    """Names the environment state it acted in (for `gigpo`)."""
    agent: str = "main"
    """Which agent spoke."""
    parse_status: ParseStatus = "ok"
    """"ok", or the first thing that was wrong with the completion's tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempted call, in order."""
    timing: TurnTiming | None = None
    """Seconds spent."""
    attachments: None = None
    """Reserved: turns are text only today."""

    path: ClassVar[TokenPath]
    """Where prompt and completion are stored, one after the other. Every turn has its own; `prompt_ids` sets it."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        given: Any = self.path
        if not isinstance(given, TokenPath):
            prompt, completion = as_ids(given, "prompt_ids"), as_ids(self.completion_ids, "completion_ids")
            path, stored = TokenTree().add(prompt, completion)
            put(self, "path", path)
            put(self, "completion_ids", stored)
        if self.num_prompt_tokens <= 0:
            raise RecordError("prompt_ids: empty; nothing would predict the first completion id")
        put(self, "stop_reason", StopReason(self.stop_reason))
        put(self, "tool_calls", tuple(self.tool_calls))
        put(self, "reward", _as_number(self.reward, "reward"))
        put(self, "advantage", _as_number(self.advantage, "advantage"))
        if self.logprobs is not None:
            put(self, "logprobs", _as_logprobs(self.logprobs, len(self.completion_ids)))
        if self.policy_versions is not None:
            put(self, "policy_versions", _as_versions(self.policy_versions, len(self.completion_ids)))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RecordError(f"temperature: expected a finite number >= 0, found {self.temperature}")

    @property
    def num_prompt_tokens(self) -> int:
        """P."""
        return self.path.length - len(self.completion_ids)

    def extends(self, earlier: Turn) -> bool:
        """Whether the prompt starts with an earlier turn's prompt and completion, id for id.

        Both belong to one trajectory.
        """
        assert self.path.tree is earlier.path.tree
        return earlier.path.length <= self.num_prompt_tokens and self.path.starts_with(earlier.path)

    def replace(self, **changes: Any) -> Turn:
        """A copy with some fields changed; ids that do not change are stored once."""
        if not changes.keys() & {"prompt_ids", "completion_ids"}:
            changes["prompt_ids"] = self.path
        return dataclasses.replace(self, **changes)


def _as_number(value: Any, name: str, hint: str = "") -> float | None:
    """One number, NaN and infinity included: what cannot be learned from is found, and counted, where credit is given.

    Raises:
        RecordError: a list, a text, an array of several, an integer that no float can hold.
    """
    if value is None or type(value) is float:
        return value
    # numpy's texts, dates and complex numbers have a __float__ too.
    is_number = hasattr(type(value), "__float__") and not getattr(value, "ndim", None) and not isinstance(value, str)
    if is_number and getattr(getattr(value, "dtype", None), "kind", "f") not in "cmMOSU":
        try:
            return float(value)
        except OverflowError:
            pass
    raise RecordError(f"{name}: {value!r:.80}; expected one number or None{hint}")


def _as_logprobs(values: object, expected: int) -> Float32:
    try:
        logprobs = np.array(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RecordError(f"logprobs: every entry must be a number ({error}); pass None for a whole turn "
                          "whose logprobs are missing") from None  # fmt: skip
    if logprobs.shape != (expected,):
        raise RecordError(f"logprobs: {logprobs.size} for {expected} completion ids")
    # NaN is its own smallest and largest: two looks, where all is well.
    if expected and not (math.isfinite(np.minimum.reduce(logprobs)) and np.maximum.reduce(logprobs) <= 0):
        bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_POSITIVE_LOGPROB))
        if bad.size:
            raise RecordError(
                f"logprobs: {logprobs[bad[0]]} at position {int(bad[0])}; expected a finite number <= 0. "
                "A logprob that is not known is missing (None), never 0.0 or NaN"
            )
        np.minimum(logprobs, np.float32(0), out=logprobs)
    logprobs.flags.writeable = False
    return logprobs


def _as_versions(values: object, expected: int) -> Int32:
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise RecordError(f"policy_versions: expected one list of integers ({error})") from None
    if given.shape != (expected,):
        raise RecordError(f"policy_versions: {given.size} for {expected} completion ids")
    if given.dtype != np.int32 and expected and not _fits_int32(given):
        raise RecordError(f"policy_versions: expected integers from -1 (unknown) to {LARGEST_ID}, found "
                          f"{given.tolist()[:4]}; pass None for a whole turn whose versions are unknown")  # fmt: skip
    versions = given.astype(np.int32)
    raw = versions.tobytes()
    if expected and raw == raw[:4] * expected:
        return _repeated(raw[:4], expected)
    versions.flags.writeable = False
    return versions


def _fits_int32(numbers: NDArray[Any]) -> bool:
    return bool(numbers.dtype.kind in "iu" and numbers.max() <= LARGEST_ID and numbers.min() >= -1)


@lru_cache(maxsize=4096)
def _repeated(number: bytes, count: int) -> Int32:
    """One int32, shown `count` times: almost every completion is of one version."""
    return np.ndarray(count, dtype=np.int32, buffer=number, strides=(0,))


# --------------------------------------------------------------------------------------------------
# Trajectory and group


@dataclass(frozen=True, kw_only=True)
class RolloutIdentity:
    """Says which rollout a record belongs to."""

    example_id: str
    """The example it is about."""
    trajectory_id: str = ""
    """Unique in its run."""
    run_id: str = ""
    """The run it belongs to, by the name of its folder; empty outside of one."""
    env: str = ""
    """The name of its environment."""
    group_id: str = ""
    """The group it belongs to."""
    sample_index: int = 0
    """Its place in the group."""
    seed: int | None = None
    """The seed of its sampling; None if it has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory(Mapping[str, Any]):
    """The record of one episode: every turn as exact ids, the conversation, and what it earned.

    It is also a read-only mapping of plain values, so that `json.dumps(dict(trajectory))` works: every field by its
    name, the keys that rollouts document (`messages`, `input_ids`, `labels`, `logprobs`, `turns` as a count,
    `samples`), `id` for the example's, and what the caller of a rollout put beside `messages`. Of a trajectory with a
    break, the flat lists `input_ids`, `labels` and `logprobs` are not among the keys, and reading one raises
    `NoFlatList`.

    Raises:
        RecordError: a reward, a part of it or an advantage that is not one number.

    Example:
        >>> first = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
        >>> second = Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-0.25])
        >>> t = Trajectory(example_id="x", turns=(first, second), reward=1.0)
        >>> t["turns"], t["input_ids"], t["labels"]
        (2, [1, 2, 3, 4, 5], [-100, -100, 3, -100, 5])
        >>> t.num_stored_tokens
        5
    """

    example_id: str
    """The example it is about."""
    turns: tuple[Turn, ...] = ()
    """Every request and response, in the order of sampling, sub-agents' included."""
    messages: tuple[Message, ...] = ()
    """The main agent's conversation, for people and tools; never the source of ids."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tool schemas that the caller of a rollout put beside `messages`; empty = the tool manager's."""
    reward: float | None = None
    """What it earned; None if it was never scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's named parts, where the environment gives them."""
    env: str = ""
    """The name of its environment."""
    trajectory_id: str = ""
    """Unique in its run."""
    run_id: str = ""
    """The run it belongs to, by the name of its folder; empty outside of one."""
    group_id: str = ""
    """The group it belongs to."""
    sample_index: int = 0
    """Its place in the group."""
    seed: int | None = None
    """The seed of its sampling."""
    advantage: float | None = None
    """The advantage of all its sampled tokens, unless a turn has its own."""
    stop_reason: StopReason | None = None
    """Why it ended."""
    truncated: bool = False
    """Whether something was cut off."""
    error: str | None = None
    """What went wrong; a trajectory with an error is never trained on."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the environment wants kept. JSON values. `info["task"]` is what the caller of a rollout put beside
    `messages`."""
    num_unrecorded_tokens: int = 0
    """Tokens that were sampled and are in no turn: of a completion that could not be recorded (then `error` says why),
    or that was cut off."""
    num_unrecorded_turns: int = 0
    """Turns that a server answered without token ids: they are in `messages`, and never trained."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "turns", _in_one_tree(self.turns))
        put(self, "messages", tuple(self.messages))
        put(self, "tools", tuple(self.tools))
        put(self, "reward", _as_number(self.reward, "reward", "; a turn's own goes into Turn(reward=...)"))
        put(self, "advantage", _as_number(self.advantage, "advantage", "; a turn's own goes into Turn(advantage=...)"))
        if not isinstance(self.reward_parts, Mapping):
            raise RecordError(f"reward_parts: {self.reward_parts!r:.80}; expected a mapping of names to numbers")
        for name, part in self.reward_parts.items():
            if _as_number(part, f"reward_parts[{name!r}]") is None:
                raise RecordError(f"reward_parts[{name!r}]: None; leave out a part that was not scored")
        if self.stop_reason is not None:
            put(self, "stop_reason", StopReason(self.stop_reason))

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the sampler produced."""
        return sum(len(turn.completion_ids) for turn in self.turns) + self.num_unrecorded_tokens

    @property
    def num_stored_tokens(self) -> int:
        """Ids held in memory: O(L), each distinct (prefix, token) once."""
        segments: set[Segment] = set()
        for turn in self.turns:
            segment = turn.path.segment
            while segment is not None and segment not in segments:
                segments.add(segment)
                segment = segment.parent
        return sum(len(segment.ids) for segment in segments)

    @property
    def bad_reward(self) -> str | None:
        """Why nothing can be learned from its rewards: missing, NaN or infinite; None if something can."""
        if self.reward is None:
            return "reward: missing"
        rewards = [self.reward, *(turn.reward for turn in self.turns if turn.reward is not None)]
        bad = next((reward for reward in rewards if not math.isfinite(reward)), None)
        return None if bad is None else f"reward: {bad} is not finite"

    @property
    def num_breaks(self) -> int:
        """Turns whose prompt does not extend the turn before it exactly."""
        return sum(1 for before, turn in pairwise(self.turns) if not turn.extends(before))

    @classmethod
    def of(cls, identity: RolloutIdentity, **fields: Any) -> Trajectory:
        """The trajectory of this rollout, with its other fields."""
        return cls(**dataclasses.asdict(identity), **fields)

    @property
    def identity(self) -> RolloutIdentity:
        """Which rollout it is."""
        return RolloutIdentity(**{f.name: getattr(self, f.name) for f in dataclasses.fields(RolloutIdentity)})

    def replace(self, **changes: Any) -> Trajectory:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    # -- the mapping view

    def __getitem__(self, key: str) -> Any:
        match key:
            case "turns":
                return len(self.turns) + self.num_unrecorded_turns
            case "input_ids" | "labels" | "logprobs":
                return getattr(self._flat(), key)
            case "samples":
                from verbatim.trajectories import build_samples  # the one look to the right, for this view

                return [_plain_sample(sample) for sample in build_samples(self)]
            case "id":
                return self.example_id
            case _ if key in _FIELDS:
                return _plain(getattr(self, key))
        beside = self._beside_messages()
        if key in beside:
            return _plain(beside[key])
        raise KeyError(f"{key!r}; a trajectory has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        yield from _FIELDS
        if not self.num_breaks:
            yield from _FLAT
        yield from ("samples", "id")
        yield from (name for name in self._beside_messages() if name not in TRAJECTORY_KEYS)

    def __contains__(self, key: object) -> bool:
        return any(key == name for name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _beside_messages(self) -> Mapping[str, Any]:
        """What the caller of a rollout gave with the messages. A field of the trajectory hides one of its name."""
        task = self.info.get("task", {})
        return task if isinstance(task, Mapping) else {}

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def _flat(self) -> _Flat:
        if self.num_breaks:
            raise NoFlatList(
                f"trajectory {self.trajectory_id or self.example_id!r} has {self.num_breaks} break(s): one list "
                "cannot hold two contexts. Read trajectory['samples'] instead, or build_samples(trajectory)"
            )
        if not self.turns:
            return _Flat([], [], [])
        ids = self.turns[-1].path.ids()
        labels = np.full(len(ids), -100, dtype=np.int64)
        logprobs: list[float | None] = [None] * len(ids)
        for turn in self.turns:
            if turn.logprobs is None:
                continue  # context only: a token without a logprob is never a label
            start, end = turn.num_prompt_tokens, turn.path.length
            labels[start:end] = turn.completion_ids
            logprobs[start:end] = turn.logprobs.tolist()
        return _Flat(ids.tolist(), labels.tolist(), logprobs)


@dataclass(frozen=True)
class _Flat:
    input_ids: list[int]
    labels: list[int]
    logprobs: list[float | None]


_FIELDS = tuple(f.name for f in dataclasses.fields(Trajectory))
_FLAT = tuple(f.name for f in dataclasses.fields(_Flat))
TRAJECTORY_KEYS = frozenset({*_FIELDS, *_FLAT, "samples", "id"})
"""What the mapping view of a trajectory calls its own."""


def _plain(value: Any) -> Any:
    """Records and arrays as dicts, lists and numbers; what is none of them as it is."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _plain_sample(sample: TrainingSample) -> dict[str, Any]:
    """Lists, one entry per token; a logprob that is not there is None, as in the flat list."""
    fields = {f.name: _plain(getattr(sample, f.name)) for f in dataclasses.fields(sample)}
    for name in ("logprobs", "teacher_logprobs"):
        if fields[name] is not None:
            fields[name] = [None if math.isnan(logprob) else logprob for logprob in fields[name]]
    return fields


def _in_one_tree(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Turns whose paths can be compared: those of an episode are, others are taken into a tree of their own."""
    turns = tuple(turns)
    if len({turn.path.tree for turn in turns}) <= 1:
        return turns
    tree = TokenTree()
    shared = []
    for turn in turns:
        path, completion_ids = tree.add(turn.prompt_ids, turn.completion_ids)
        shared.append(dataclasses.replace(turn, prompt_ids=path, completion_ids=completion_ids))  # type: ignore[arg-type]
    return tuple(shared)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one example: what advantages are computed over."""

    group_id: str
    """Unique in its run."""
    example_id: str
    """The example they are about."""
    env: str
    """The name of their environment."""
    trajectories: tuple[Trajectory, ...]
    """In the order of their `sample_index`; failed ones included."""
    index: int = -1
    """Its number in the run, in the order in which groups are drawn; -1 = unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))

    @property
    def completed(self) -> tuple[Trajectory, ...]:
        """Those without an error."""
        return tuple(t for t in self.trajectories if t.error is None)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Those of `completed` whose rewards are there and finite: a baseline is taken, and an example is judged, over
        them. A missing reward is not 0."""
        return tuple(t for t in self.completed if t.bad_reward is None)


# --------------------------------------------------------------------------------------------------
# What the trainer sees


_PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures",
              "teacher_logprobs")  # fmt: skip


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSample:
    """A run of tokens with what is trained marked; all arrays are parallel over its length L.

    Example: prompt `[1, 2]`, completion `[3]`, a tool's reply `[4]`, completion `[5]` gives
    `token_ids = [1, 2, 3, 4, 5]`, `loss_mask = [F, F, T, F, T]`, `chunk_ids = [-1, -1, 0, -1, 1]`.
    """

    token_ids: Int32
    """int32 [L]."""
    loss_mask: Bool
    """bool [L]; True where a sampled token is trained."""
    logprobs: Float32
    """Inference logprobs, float32 [L]; NaN where nothing was sampled, or the logprob is missing."""
    advantages: Float32
    """float32 [L]; 0 outside the mask."""
    chunk_ids: Int32
    """The turn's index, int32 [L]; -1 outside the mask."""
    policy_versions: Int32
    """int32 [L]; -1 outside the mask, or unknown."""
    temperatures: Float32
    """float32 [L]; 1 outside the mask."""
    teacher_logprobs: Float32 | None = None
    """float32 [L], or None."""
    trajectory_id: str = ""
    """The trajectory it comes from."""
    group_id: str = ""
    """That trajectory's group."""
    env: str = ""
    """Its environment."""
    part: int = -1
    """Which of its trajectory's samples it is, from 0; -1 = unknown. Two samples of one `trajectory_id` and part are of
    two trajectories."""

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None:
                assert value.shape == shape, f"{name}: {value.shape} != {shape}"
                if value.flags.writeable:
                    object.__setattr__(self, name, _frozen(value))
        assert not (len(self.loss_mask) and self.loss_mask[0]), "the first token has no context to be trained in"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens under the mask."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """What a micro-batch predicts, all arrays parallel over its M trained tokens.

    Several targets may share one source position (the children of a tree node).
    """

    source_positions: Int32
    """Index into `input_ids` of the token whose hidden state predicts the target: int32 [M]."""
    target_ids: Int32
    """int32 [M]."""
    temperatures: Float32
    """float32 [M]."""
    inference_logprobs: Float32
    """float32 [M]; NaN = missing (sft only)."""
    advantages: Float32
    """float32 [M]."""
    chunk_ids: Int32
    """int32 [M]."""
    trajectories: Int32
    """Index into `MicroBatch.trajectory_ids`: int32 [M]."""
    offsets: Int32
    """Place of the target in its trajectory's samples laid one after the other: int32 [M]."""
    teacher_logprobs: Float32 | None = None
    """float32 [M], or None."""

    def __len__(self) -> int:
        return len(self.target_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass, in gather form, so that rows and trees are one type.

    Token u attends to the tokens k with `starts[k] <= starts[u] < ends[k]` and k <= u (Euler-tour intervals of
    a forest in depth-first order). Rows are the special case of a forest of paths: then `starts` counts up and
    `ends[k]` is the end of k's row.

    Example: the rows `[7, 8]` and `[9]` are `input_ids = [7, 8, 9]`, `position_ids = [0, 1, 0]`,
    `starts = [0, 1, 2]`, `ends = [2, 2, 3]`.
    """

    input_ids: Int32
    """int32 [U]."""
    position_ids: Int32
    """Depth of each token in its row or tree: int32 [U]."""
    starts: Int32
    """Euler-tour entry of each token: int32 [U]; equals its index, in depth-first order."""
    ends: Int32
    """Euler-tour exit of each token: int32 [U]."""
    targets: Targets
    """What is predicted."""
    trajectory_ids: tuple[str, ...]
    """The trajectories that have targets here."""
    trajectory_lengths: Int32
    """Tokens of each of them, all its samples laid one after the other: int32 [len(trajectory_ids)]."""
    is_rows: bool = True
    """Whether every tree is a path, which attention kernels for rows may rely on."""
    num_repeated_tokens: int = 0
    """Tokens that an earlier micro-batch of the same optimizer step computes too, because the forest was cut."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.input_ids)

    @property
    def row_lengths(self) -> Int32:
        """Length of each row, where `is_rows`: int32 [R]."""
        assert self.is_rows
        (first,) = np.nonzero(self.position_ids == 0)
        return np.diff(np.append(first, len(self.position_ids))).astype(np.int32)
