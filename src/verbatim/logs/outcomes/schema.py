"""Defines the columns of an outcome file: one row per trajectory, with a list of its turns."""

from __future__ import annotations

import pyarrow as pa

from verbatim.core.formats import metadata_of

KIND = "step-*.parquet"
"""The key of outcome files in `FORMATS`."""


def _field(name: str, kind: pa.DataType, about: str) -> pa.Field:
    return pa.field(name, kind, metadata={"description": about})


NAME = pa.dictionary(pa.int32(), pa.string())
"""A string that many rows share, so that it is stored only once."""
_NUMBERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
"""Numbers by name, as a list of pairs, because Parquet has no mapping with a fixed order of keys."""

TURN = pa.struct(
    [
        _field("outcome", NAME, "outcome of the completion: trained, evaluation, or the reason why it was dropped"),
        _field("prompt_of_turn", pa.int32(), "the earlier turn whose prompt and completion begin this prompt"),
        _field("prompt_shared", pa.int32(), "number of ids shared with the prompt and completion of that turn"),
        _field("prompt_new_ids", pa.list_(pa.int32()), "the prompt's ids after the shared ones"),
        _field("completion_ids", pa.list_(pa.int32()), "the sampled ids"),
        _field("logprobs", pa.list_(pa.float32()), "the sampler's logprob of each sampled id; null = missing"),
        _field(
            "trainer_logprobs", pa.list_(pa.float32()), "the trainer's logprob of each sampled id; null = not trained"
        ),
        _field(
            "gradients", pa.list_(pa.float32()), "derivative of the loss, before normalising, by the trainer's logprob"
        ),
        _field(
            "teacher_logprobs", pa.list_(pa.float32()), "the teacher's logprob of each sampled id; null = not requested"
        ),
        _field("policy_versions", pa.list_(pa.int32()), "the policy version that sampled each id; null = unknown"),
        _field(
            "routed_experts",
            pa.binary(),
            "the experts that computed the turn's tokens, in numpy's file format; null = not recorded",
        ),
        _field(
            "kept_sets",
            pa.list_(pa.list_(pa.int32())),
            "the kept set of each sampled id, empty = all ids; null = nothing was cut, or unknown",
        ),
        _field("advantage", pa.float64(), "advantage of the turn's tokens; null = that of the trajectory"),
        _field("reward", pa.float64(), "the turn's own reward; null = none"),
        _field("stop_reason", NAME, "why the completion ended"),
        _field("temperature", pa.float64(), "the sampling temperature"),
        _field("agent", NAME, "the agent that sampled the turn"),
        _field("trained", pa.bool_(), "true unless the turn was sampled with trained=False"),
        _field("parse_status", NAME, "ok, or the first error in the turn's tool calls"),
        _field("state_key", pa.string(), "key of the environment's state before the turn"),
        _field("tool_calls", pa.string(), "all attempted tool calls, as JSON"),
        _field(
            "seconds_queued", pa.float64(), "from the request until its first token is processed; null = not measured"
        ),
        _field("seconds_generated", pa.float64(), "from the first processed token to the last sampled token"),
        _field("seconds_tools", pa.float64(), "in tools and environment after the turn"),
    ]
)

SCHEMA = pa.schema(
    [
        _field(
            "step",
            pa.int32(),
            "the step that trained the trajectory, before which it was dropped, or after which it was evaluated",
        ),
        _field("trajectory_id", pa.string(), "id that is unique within the run"),
        _field("run_id", NAME, "name of the run's folder"),
        _field("env", NAME, "the environment"),
        _field("example_id", pa.string(), "the example"),
        _field("group_id", pa.string(), "the group"),
        _field("sample_index", pa.int32(), "index within the group"),
        _field("seed", pa.int64(), "sampling seed"),
        _field("reward", pa.float64(), "the reward; null = never scored"),
        _field("reward_parts", _NUMBERS, "the reward's named parts"),
        _field("agent_rewards", _NUMBERS, "rewards by agent, for agents with a reward of their own"),
        _field("advantage", pa.float64(), "advantage of the tokens, unless a turn has its own"),
        _field("reason", NAME, "why no token was trained; null = each turn has its own outcome"),
        _field("flags", pa.list_(NAME), "the filters that flagged the trajectory"),
        _field("error", pa.string(), "the error; null = none"),
        _field("stop_reason", NAME, "why the episode ended"),
        _field("truncated", pa.bool_(), "true if the episode was cut off"),
        _field("num_turns", pa.int32(), "number of turns"),
        _field("num_sampled_tokens", pa.int64(), "number of sampled tokens"),
        _field("num_trained_tokens", pa.int64(), "number of trained tokens"),
        _field("num_breaks", pa.int32(), "turns whose prompt extends no earlier turn of the same agent"),
        _field("num_unrecorded_tokens", pa.int64(), "sampled tokens that are in no turn"),
        _field("unrecorded", NAME, "the outcome of the tokens that are in no turn"),
        _field("num_unrecorded_turns", pa.int32(), "turns that a server answered without token ids"),
        _field("messages", pa.string(), "the main agent's conversation, as JSON"),
        _field("tools", pa.string(), "the tool schemas in the prompt, as JSON"),
        _field("info", pa.string(), "further facts from the environment, as JSON"),
        _field("turns", pa.list_(TURN), "all requests and responses, in the order of sampling"),
    ],
    metadata=metadata_of(KIND),
)
