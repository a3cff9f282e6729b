"""Lists every metric of a run with its unit and meaning: for the viewer, for services, and for docs/metrics.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them."""

    name: str
    """As it is reported; `{env}` and the like stand for any name."""
    unit: str
    """"tokens", "seconds", "share" (0 to 1), "nats", ...; empty for what has none."""
    about: str
    """The meaning, as plain text."""
    group: str = ""
    """The heading of docs/metrics.md that it stands under."""
    see: str = ""
    """A page of docs/ that says more, with its heading: `asynchrony.md#the-canary`."""


_GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Rollouts": (
        Metric("rollouts", "rollouts", "rollouts of the batch"),
        Metric("rollouts/failed", "rollouts", "those that failed with an error"),
        Metric("rollouts/failed_share", "share", "their share; the console's column \"failed\""),
        Metric("errors/{kind}", "rollouts", "failed ones by the first word of their error: environment, judge, "
               "template, sampler, timeout, record, reward, advantage, worker, no_turns (the policy sampled nothing), "
               "program_crashed, program_hung, program_silent"),
        Metric("success", "share", "rollouts that reached the goal: the environment's is_success, or else a reward of "
               "at least 1"),
        Metric("success/{env}", "share", "the same, of one environment"),
        Metric("turns", "turns per rollout", "mean number of turns"),
        Metric("tool_calls", "calls per rollout", "mean number of tool calls"),
        Metric("tool_errors", "calls per rollout", "calls that failed: unreadable, no such tool, wrong arguments, "
               "exception, timeout, answer cut"),
        Metric("valid_format", "share", "of the turns that try a tool call, those whose calls are all readable and fit "
               "a tool; absent where no turn tries one"),
        Metric("completion_tokens", "tokens per rollout", "mean number of sampled tokens"),
        Metric("truncated", "share", "rollouts that were cut off for any reason"),
        Metric("truncated/{reason}", "share", "those, by stop reason", see="rollouts.md#how-an-episode-ends"),
        Metric("malformed", "share", "rollouts that ended because no tool call could be read"),
        Metric("samples", "samples", "training samples of the batch"),
        Metric("breaks", "turns", "turns of agents that had spoken before, whose prompt extends no sample"),
        Metric("breaks/{reason}", "turns", "those whose prompts were rendered anew, by reason"),
        Metric("truncation_mismatch", "share", "with accept_truncation_mismatch = true: trained tokens that were drawn "
               "from a distribution cut by top-p, top-k or min-p. The trainer's logprobs are of the whole one, so "
               "importance_ratio_mean is below 1 and mismatch_kl above 0 by what was cut: a bias"),
        Metric("kept_ids/mean", "ids per token", "where top-p, top-k or min-p cut: mean number of ids among which a "
               "trained token was drawn, of those of which some were cut off. Each takes 4 bytes",
               see="algorithms.md#cut-distributions"),
        Metric("kept_ids/max", "ids per token", "the most of them"),
        Metric("kept_ids/cut", "share", "trained tokens of which something was cut off"),
    ),
    "Rewards": (
        Metric("reward/mean", "reward", "mean raw reward"),
        Metric("reward/std", "reward", "its standard deviation, of the population"),
        Metric("reward/{env}/mean", "reward", "mean raw reward of one environment"),
        Metric("reward/{env}/std", "reward", "its standard deviation"),
        Metric("reward_part/{env}/{part}/mean", "reward", "a named part that score returned, over the rollouts that "
               "have it; in an evaluation reward_part/{part}/mean"),
        Metric("reward_part/{env}/{part}/std", "reward", "its standard deviation"),
        Metric("agent_reward/{env}/{agent}/mean", "reward", "what an agent with rewards of its own earned, where score "
               "returned AgentScores; in an evaluation agent_reward/{agent}/mean"),
        Metric("agent_reward/{env}/{agent}/std", "reward", "its standard deviation"),
        Metric("judge/requests", "requests", "requests of the batch's judges of which the answer was not in the cache, "
               "failed episodes included", see="environments.md#a-judge-or-a-reward-model"),
        Metric("judge/cached", "requests", "requests that the cache answered"),
        Metric("judge/retries", "requests", "tries after the first"),
        Metric("judge/failed", "episodes", "episodes without a verdict"),
        Metric("judge/unreadable", "answers", "answers that could not be read"),
        Metric("judge/prompt_tokens", "tokens", "tokens of the prompts"),
        Metric("judge/completion_tokens", "tokens", "tokens of the answers"),
        Metric("judge/cost", "price", "their price, where it is given"),
    ),
    "Filters and examples": (
        Metric("filters/{name}/flagged", "rollouts", "rollouts that the filter flagged", see="algorithms.md#filters"),
        Metric("filters/{name}/dropped", "rollouts", "rollouts that it dropped"),
        Metric("filtered_rollouts/{env}/easy", "rollouts", "rollouts that online difficulty filtering dropped since "
               "the step before because all of their group succeeded; 0 where it dropped none, or is off"),
        Metric("filtered_rollouts/{env}/hard", "rollouts", "because all of their group failed"),
        Metric("filtered_rollouts/{env}/flat", "rollouts", "because all of their group earned the same in between"),
        Metric("pool/{env}/easy", "share", "examples of the data set that are in the easy pool",
               see="algorithms.md#which-examples-which-groups"),
        Metric("pool/{env}/normal", "share", "examples that are sampled"),
        Metric("pool/{env}/hard", "share", "examples in the hard pool"),
        Metric("evicted_examples/{env}/easy", "share", "groups since the step before whose example moved to the easy "
               "pool"),
        Metric("evicted_examples/{env}/hard", "share", "whose example moved to the hard pool"),
    ),
    "Age": (
        Metric("staleness/mean", "steps", "mean age of the batch's rollouts that are not too old, filtered ones "
               "included: the batch's number minus the policy version of the first token",
               see="asynchrony.md#what-to-look-at"),
        Metric("staleness/max", "steps", "the oldest of them"),
        Metric("staleness/age/{a}", "rollouts", "how many have the age a"),
        Metric("staleness/dropped", "rollouts", "rollouts dropped as too old since the last step, before a batch took "
               "them or when it was built"),
    ),
    "Training": (
        Metric("loss", "", "the loss divided by its normaliser; NaN where no optimizer step was taken, as grad_norm "
               "and lr"),
        Metric("grad_norm", "", "the gradient's norm before clipping, mean over the optimizer steps"),
        Metric("lr", "", "the learning rate of the last optimizer step"),
        Metric("entropy", "nats", "mean entropy of the policy's distribution at the trained tokens"),
        Metric("mismatch_kl", "nats", "how far the trainer's policy is from the one that sampled: mean(w - log w - 1) "
               "over trained tokens, w = exp(trainer logprob - inference logprob)"),
        Metric("ref_kl", "nats", "with a reference: how far the policy is from it, mean(exp(r - l) - (r - l) - 1) over "
               "trained tokens", see="algorithms.md#a-reference"),
        Metric("trained_tokens", "tokens", "targets whose gradient was taken"),
        Metric("num_optimizer_steps", "optimizer steps", "taken on the batch"),
        Metric("num_micro_batches", "forward passes", "of the batch"),
        Metric("num_tokens", "tokens", "tokens computed"),
        Metric("packing/sample_tokens", "tokens", "tokens of the samples: what rows compute", see="performance.md"),
        Metric("packing/repeated_tokens", "tokens", "computed more than once because a tree was cut"),
        Metric("packing/tree", "share", "computed tokens that lay in trees"),
        Metric("packing/fallback", "", "1 where trees were found to be wrong and rows are taken instead"),
        Metric("seconds", "seconds", "spent on the batch"),
        Metric("tokens_per_second", "tokens per second", "computed tokens for each of them"),
        Metric("policy_version", "", "number of the weights that were published"),
        Metric("router/replayed", "share", "with recorded routing: trained tokens that are predicted from a token with "
               "recorded experts", see="experts.md#recorded-routing"),
        Metric("router/aux_loss", "", "the load-balancing loss, before its coefficient",
               see="experts.md#the-load-balancing-loss"),
        Metric("router/load_max", "", "tokens of the busiest expert over the mean of its layer, the largest of all "
               "layers"),
        Metric("router/entropy", "nats", "mean entropy of a token's router probabilities"),
    ),
    "Losses": (
        Metric("importance_ratio_mean", "", "exp(trainer logprob - inference logprob), of losses that read both",
               see="algorithms.md"),
        Metric("importance_ratio_min", "", "the smallest of them"),
        Metric("importance_ratio_max", "", "the largest"),
        Metric("masked_by_loss", "tokens", "tokens whose policy gradient the loss took away"),
        Metric("dppo_dropped_low", "share", "default: trained tokens that it masks because they became too unlikely"),
        Metric("dppo_dropped_high", "share", "default: because they became too likely"),
        Metric("clipped_low", "share", "trained tokens whose ratio is clipped from below; gspo: tokens of clipped "
               "trajectories"),
        Metric("clipped_high", "share", "trained tokens whose ratio is clipped from above"),
        Metric("sequence_ratio_mean", "", "gspo: the ratio of whole trajectories"),
        Metric("sequence_ratio_min", "", "gspo: the smallest of them"),
        Metric("sequence_ratio_max", "", "gspo: the largest"),
        Metric("chunk_ratio_mean", "", "ipa: the ratio of chunks, the sampled tokens of one turn"),
        Metric("chunk_ratio_min", "", "ipa: the smallest of them"),
        Metric("chunk_ratio_max", "", "ipa: the largest"),
        Metric("chunks_dropped", "share", "ipa: chunks that are masked"),
        Metric("teacher_kl", "nats", "with a teacher: mean of trainer logprob - teacher logprob over trained tokens"),
    ),
    "Ledger": (
        Metric("ledger/sampled", "tokens", "tokens since the run began: sampled = trained + pending + dropped"),
        Metric("ledger/trained", "tokens", "those that were trained"),
        Metric("ledger/pending", "tokens", "those of episodes in flight and of groups that wait to be trained"),
        Metric("ledger/masked_by_loss", "tokens", "trained ones whose policy gradient the loss took away"),
        Metric("ledger/dropped/{reason}", "tokens", "those that are never trained, by reason",
               see="trajectories.md"),
    ),
    "Time": (
        Metric("time/step", "seconds", "from one finished step to the next", see="asynchrony.md#what-to-look-at"),
        Metric("time/sampler_idle", "seconds", "how long the sampler had nothing to do in the step"),
        Metric("time/trainer_idle", "seconds", "how long the trainer had: the larger one says which side to help"),
        Metric("time/wait_for_batch", "seconds", "how long the orchestrator waited for rollouts"),
        Metric("time/wait_for_trainer", "seconds", "how long it waited for the trainer's answer"),
        Metric("time/weight_sync", "seconds", "loading and checking a version of the weights"),
        Metric("time/weight_broadcast", "seconds", "the trainer's, where it broadcasts its weights",
               see="vllm.md#weights-from-the-trainers-devices"),
        Metric("time/weight_meeting", "seconds", "those of them until all servers were in the group"),
        Metric("time/sampler_falling_asleep", "seconds", "where both take turns on one device: from the hand-over of a "
               "batch until the sampler has left the device", see="vllm.md#one-gpu"),
        Metric("time/sampler_asleep", "seconds", "from then until the trainer has left it"),
        Metric("time/trainer_moving", "seconds", "copies of the trainer to the device and back"),
        Metric("loop/lag_mean", "seconds", "by how much the event loop was late"),
        Metric("loop/lag_max", "seconds", "the most"),
    ),
    "Queues and workers": (
        Metric("queue/groups_in_flight", "groups", "groups that are sampled, or wait for places"),
        Metric("queue/groups_ready", "groups", "groups that wait for a batch"),
        Metric("queue/batches_submitted", "batches", "batches that the trainer has or will get"),
        Metric("sampler/tokens_per_second", "tokens per second", "sampled tokens for each second that the sampler was "
               "busy"),
        Metric("rollout/workers", "processes", "processes or Ray actors in which episodes run",
               see="rollouts.md#in-processes-of-this-machine"),
        Metric("rollout/workers_lost", "processes", "those that were lost since the start"),
        Metric("rollout/workers_lost/{env}", "processes", "by environment, where episodes run in processes"),
        Metric("rollout/episodes_rerun", "episodes", "episodes begun anew because a worker was lost"),
    ),
    "Weights": (
        Metric("weights/bytes", "bytes", "size of the version that was published"),
        Metric("weights/canary", "nats", "mean difference of the sampler's logprobs from the trainer's on the canary's "
               "probes, of the replica that is furthest",
               see="asynchrony.md#the-canary"),
        Metric("weights/canary_allowed", "nats", "the largest such difference: inference.canary_tolerance, or what "
               "rounding explains", see="asynchrony.md#the-canary"),
        Metric("weights/broadcast", "", "where the trainer broadcasts its weights: 1 where all servers of the group "
               "received the version, else 0", see="vllm.md#weights-from-the-trainers-devices"),
        Metric("weights/broadcast_bytes", "bytes", "sent, to all of them at one time"),
    ),
    "Replicas of the sampler": (
        Metric("replica/{i}/serving", "", "1 where it takes requests"),
        Metric("replica/{i}/policy_version", "", "the version whose check it passed last"),
        Metric("replica/{i}/restarts", "restarts", "how often it was started again"),
        Metric("replica/{i}/unverified_tensors", "tensors", "tensors of the weights it loaded last that no digest "
               "tells of: only the canary does", see="vllm.md#how-a-weight-update-proves-itself"),
        Metric("replica/{i}/in_flight", "requests", "requests that the run has sent to it"),
        Metric("replica/{i}/running", "requests", "what its server says: requests in the batch"),
        Metric("replica/{i}/waiting", "requests", "requests in line for it"),
        Metric("replica/{i}/kv_usage", "share", "the key/value cache in use"),
        Metric("replica/{i}/tokens_per_second", "tokens per second", "tokens drawn since the step before"),
        Metric("replica/{i}/prefix_cache_hit_rate", "share", "prompt tokens found in the prefix cache"),
        Metric("replica/{i}/waking_seconds", "seconds", "its last waking, without loading, where it takes turns with "
               "the trainer", see="vllm.md#one-gpu"),
        Metric("replicas/{figure}/min", "", "of more than 32 replicas none has metrics of its own: the lowest value of "
               "these, of all replicas"),
        Metric("replicas/{figure}/mean", "", "the mean"),
        Metric("replicas/{figure}/max", "", "the highest"),
        Metric("replicas/serving", "replicas", "replicas that take requests"),
        Metric("replicas/lost", "replicas", "deaths since the start of this process"),
        Metric("replicas/restarts", "restarts", "restarts since then"),
        Metric("replicas/failed_checks", "checks", "checks that found wrong weights"),
        Metric("replicas/requests_waiting", "requests", "requests in line because every replica is full"),
        Metric("replicas/requests_moved", "requests", "requests that left the replica that held their prefix"),
        Metric("replicas/requests_failed", "requests", "requests on which a replica failed that lives"),
        Metric("replicas/requests_resent", "requests", "requests that were sent again"),
        Metric("replicas/requests_lost", "requests", "those of which the lost replica did not say what it had drawn, "
               "so that its tokens are in no count"),
        Metric("replicas/tokens_lost", "tokens", "tokens that are known to be lost; in training they are "
               "ledger/dropped/lost_replica"),
    ),
    "Evaluation": (
        Metric("examples", "examples", "examples of the evaluation, each played equally often"),
        Metric("episodes", "episodes", "episodes of the evaluation; 0 where it was left out because examples failed"),
        Metric("failed", "episodes", "those that failed with an error; they count as no success"),
        Metric("success/low", "share", "lower end of the 95% interval of success", see="evaluation.md#intervals"),
        Metric("success/high", "share", "upper end"),
        Metric("reward/low", "reward", "lower end of the 95% interval of reward/mean; NaN where all rewards are equal"),
        Metric("reward/high", "reward", "upper end"),
        Metric("reward_part/{part}/mean", "reward", "a named part of the reward"),
        Metric("reward_part/{part}/std", "reward", "its standard deviation"),
        Metric("agent_reward/{agent}/mean", "reward", "what an agent with rewards of its own earned"),
        Metric("agent_reward/{agent}/std", "reward", "its standard deviation"),
    ),
}  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(
    Metric(metric.name, metric.unit, metric.about, group, metric.see)
    for group, metrics in _GROUPS.items()
    for metric in metrics
)
"""In the order of docs/metrics.md. Losses, filters and judges of one's own may report others."""


def about(name: str) -> Metric | None:
    """The metric of this name; None for one that is not listed.

    >>> about("filters/zero_advantage/flagged").unit
    'rollouts'
    """
    return _BY_NAME.get(name) or next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def descriptions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """`{name: {"unit": ..., "about": ..., "group": ...}}` of those that are listed."""
    found = ((name, about(name)) for name in names)
    return {
        name: {"unit": metric.unit, "about": metric.about, "group": metric.group} for name, metric in found if metric
    }


_BY_NAME = {metric.name: metric for metric in METRICS}


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    """Of the families; an environment's name may hold slashes."""
    return tuple(
        (re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(metric.name))), metric)
        for metric in METRICS
        if "{" in metric.name
    )
