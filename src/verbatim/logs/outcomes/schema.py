"""Defines the columns of a outcome file: a row for each trajectory, and in it a list of its turns."""

from __future__ import annotations

import pyarrow as pa

from verbatim.core.formats import metadata_of

KIND = "step-*.parquet"
"""The key of `FORMATS`."""


def _field(name: str, kind: pa.DataType, about: str) -> pa.Field:
    return pa.field(name, kind, metadata={"description": about})


NAME = pa.dictionary(pa.int32(), pa.string())
"""A text that many rows share."""
_NUMBERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
"""Numbers by name."""

TURN = pa.struct(
    [
        _field("outcome", NAME, "what became of its completion: trained, evaluation, or the reason why it was dropped"),
        _field(
            "prompt_of_turn", pa.int32(), "the earlier turn whose context, prompt and completion, begins the prompt"
        ),
        _field("prompt_shared", pa.int32(), "how many ids of that context do"),
        _field("prompt_new_ids", pa.list_(pa.int32()), "the prompt's ids after them"),
        _field("completion_ids", pa.list_(pa.int32()), "the sampled ids"),
        _field("logprobs", pa.list_(pa.float32()), "the sampler's logprob of each; null = missing"),
        _field("trainer_logprobs", pa.list_(pa.float32()), "the trainer's logprob of each; null = not trained"),
        _field("gradients", pa.list_(pa.float32()), "the derivative of the loss, not yet divided, by that logprob"),
        _field("teacher_logprobs", pa.list_(pa.float32()), "the teacher's logprob of each; null = not asked for"),
        _field("policy_versions", pa.list_(pa.int32()), "the policy version that sampled each; null = unknown"),
        _field(
            "routed_experts", pa.binary(), "the experts that computed its tokens, a file of numpy; null = not recorded"
        ),
        _field(
            "kept_sets",
            pa.list_(pa.list_(pa.int32())),
            "the ids among which each completion id was drawn, none = all; null = nothing was cut, or not known",
        ),
        _field("advantage", pa.float64(), "of its tokens; null = the trajectory's"),
        _field("reward", pa.float64(), "its own reward; null = it has none"),
        _field("stop_reason", NAME, "why the completion ended"),
        _field("temperature", pa.float64(), "it was sampled at"),
        _field("agent", NAME, "which agent spoke"),
        _field("trained", pa.bool_(), "whether it was meant to be trained"),
        _field("parse_status", NAME, "ok, or the first thing that was wrong with its tool calls"),
        _field("state_key", pa.string(), "names the environment state it acted in"),
        _field("tool_calls", pa.string(), "every attempted call, as JSON"),
        _field("seconds_queued", pa.float64(), "from the request to its first token processed; null = not measured"),
        _field("seconds_generated", pa.float64(), "from there to the last sampled token"),
        _field("seconds_tools", pa.float64(), "in tools and environment afterwards"),
    ]
)

SCHEMA = pa.schema(
    [
        _field("step", pa.int32(), "the step that it was trained in, dropped before, or evaluated after"),
        _field("trajectory_id", pa.string(), "unique in the run"),
        _field("run_id", NAME, "the run, by the name of its folder"),
        _field("env", NAME, "its environment"),
        _field("example_id", pa.string(), "the example it is about"),
        _field("group_id", pa.string(), "its group"),
        _field("sample_index", pa.int32(), "its place in the group"),
        _field("seed", pa.int64(), "of its sampling"),
        _field("reward", pa.float64(), "what it earned; null = it was never scored"),
        _field("reward_parts", _NUMBERS, "the reward's named parts"),
        _field("agent_rewards", _NUMBERS, "what agents with rewards of their own earned, by agent"),
        _field("advantage", pa.float64(), "of its tokens, unless a turn has its own"),
        _field("reason", NAME, "why nothing of it is trained; null where single turns decide"),
        _field("flags", pa.list_(NAME), "the filters that flagged it"),
        _field("error", pa.string(), "what went wrong; null = nothing"),
        _field("stop_reason", NAME, "why it ended"),
        _field("truncated", pa.bool_(), "whether something was cut off"),
        _field("num_turns", pa.int32(), "turns"),
        _field("num_sampled_tokens", pa.int64(), "tokens that the sampler produced"),
        _field("num_trained_tokens", pa.int64(), "tokens that are trained"),
        _field("num_breaks", pa.int32(), "turns of agents that had spoken before, whose prompt extends no sample"),
        _field("num_unrecorded_tokens", pa.int64(), "sampled tokens that are in no turn"),
        _field("unrecorded", NAME, "their outcome"),
        _field("num_unrecorded_turns", pa.int32(), "turns that a server answered without token ids"),
        _field("messages", pa.string(), "the main agent's conversation, as JSON"),
        _field("tools", pa.string(), "the tool schemas beside the messages, as JSON"),
        _field("info", pa.string(), "what the environment wants kept, as JSON"),
        _field("turns", pa.list_(TURN), "every request and response, in the order of sampling"),
    ],
    metadata=metadata_of(KIND),
)
