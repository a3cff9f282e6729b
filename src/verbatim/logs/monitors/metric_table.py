"""Lists all metrics of a run with unit and meaning, for the viewer, services, and docs/metrics.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose names share a pattern."""

    name: str
    """The name as reported. A placeholder such as `{env}` stands for any name."""
    unit: str
    """"tokens", "seconds", "share" (0 to 1), "nats", ...; empty if there is no unit."""
    about: str
    """The meaning, as plain text."""
    group: str = ""
    """The heading of the metric's section in docs/metrics.md."""
    see: str = ""
    """The page and heading in docs/ with details, such as `asynchrony.md#the-canary`."""


_GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Rollouts": (
        Metric("rollouts", "rollouts", "rollouts of the batch"),
        Metric("rollouts/failed", "rollouts", "rollouts that failed with an error"),
        Metric("rollouts/failed_share", "share", "share of failed rollouts; the console's column \"failed\""),
        Metric("errors/{kind}", "rollouts", "failed rollouts by the first word of the error: environment, judge, "
               "template, sampler, timeout, record, reward, advantage, worker, no_turns (the policy sampled nothing), "
               "program_crashed, program_hung, program_silent"),
        Metric("success", "share", "rollouts that reached the goal: the environment's is_success, or else a reward of "
               "at least 1"),
        Metric("success/{env}", "share", "success in one environment"),
        Metric("turns", "turns per rollout", "mean number of turns"),
        Metric("tool_calls", "calls per rollout", "mean number of tool calls"),
        Metric("tool_errors", "calls per rollout", "mean number of calls that failed: unreadable, no such tool, "
               "wrong arguments, exception, timeout, result cut off"),
        Metric("valid_format", "share", "turns whose tool calls are all readable and fit a tool, among the turns with "
               "tool calls; absent if no turn has calls"),
        Metric("completion_tokens", "tokens per rollout", "mean number of sampled tokens"),
        Metric("truncated", "share", "rollouts that were cut off for any reason"),
        Metric("truncated/{reason}", "share", "rollouts that were cut off, by stop reason",
               see="rollouts.md#how-an-episode-ends"),
        Metric("malformed", "share", "rollouts that ended because no tool call could be read"),
        Metric("samples", "samples", "training samples of the batch"),
        Metric("breaks", "turns", "turns whose prompt extends no earlier turn of the same agent"),
        Metric("breaks/{reason}", "turns", "breaks whose prompt was rendered from scratch, by reason"),
        Metric("truncation_mismatch", "share", "with accept_truncation_mismatch = true: trained tokens that were "
               "sampled from a distribution cut by top-p, top-k or min-p. The trainer's logprobs are of the full "
               "distribution, so the cut biases importance_ratio_mean below 1 and mismatch_kl above 0"),
        Metric("kept_ids/mean", "ids per token", "with top-p, top-k or min-p: mean size of the kept sets of trained "
               "tokens, among those whose distribution was cut. Each id takes 4 bytes",
               see="algorithms.md#cut-distributions"),
        Metric("kept_ids/max", "ids per token", "size of the largest kept set"),
        Metric("kept_ids/cut", "share", "trained tokens whose distribution was cut"),
    ),
    "Rewards": (
        Metric("reward/mean", "reward", "mean raw reward"),
        Metric("reward/std", "reward", "population standard deviation of the raw reward"),
        Metric("reward/{env}/mean", "reward", "mean raw reward of one environment"),
        Metric("reward/{env}/std", "reward", "population standard deviation of the raw reward of one environment"),
        Metric("reward_part/{env}/{part}/mean", "reward", "mean of a named reward part, over the rollouts that have "
               "it; in an evaluation reward_part/{part}/mean"),
        Metric("reward_part/{env}/{part}/std", "reward", "standard deviation of a named reward part"),
        Metric("agent_reward/{env}/{agent}/mean", "reward", "mean reward of one agent, if score returned AgentScores; "
               "in an evaluation agent_reward/{agent}/mean"),
        Metric("agent_reward/{env}/{agent}/std", "reward", "standard deviation of the reward of one agent"),
        Metric("judge/requests", "requests", "requests to the batch's judges that the cache did not answer, including "
               "those of failed episodes", see="environments.md#a-judge-or-a-reward-model"),
        Metric("judge/cached", "requests", "requests to judges that the cache answered"),
        Metric("judge/retries", "requests", "requests to judges that were sent again after a failure"),
        Metric("judge/failed", "episodes", "episodes for which the judge gave no verdict"),
        Metric("judge/unreadable", "answers", "answers of judges that could not be parsed"),
        Metric("judge/prompt_tokens", "tokens", "prompt tokens of the requests to judges"),
        Metric("judge/completion_tokens", "tokens", "tokens of the judges' answers"),
        Metric("judge/cost", "price", "price of the judges' tokens, if prices are configured"),
    ),
    "Filters and examples": (
        Metric("filters/{name}/flagged", "rollouts", "rollouts that the filter flagged", see="algorithms.md#filters"),
        Metric("filters/{name}/dropped", "rollouts", "rollouts that the filter dropped"),
        Metric("filtered_rollouts/{env}/easy", "rollouts", "rollouts that online difficulty filtering dropped since "
               "the previous step because their whole group succeeded; 0 if it dropped none or is off"),
        Metric("filtered_rollouts/{env}/hard", "rollouts", "rollouts that it dropped because their whole group failed"),
        Metric("filtered_rollouts/{env}/flat", "rollouts", "rollouts that it dropped because their whole group earned "
               "the same reward, between failure and success"),
        Metric("pool/{env}/easy", "share", "examples of the data set that are in the easy pool",
               see="algorithms.md#which-examples-which-groups"),
        Metric("pool/{env}/normal", "share", "examples of the data set that are in the normal pool, from which "
               "groups are sampled"),
        Metric("pool/{env}/hard", "share", "examples of the data set that are in the hard pool"),
        Metric("evicted_examples/{env}/easy", "share", "groups since the previous step whose example moved to the "
               "easy pool"),
        Metric("evicted_examples/{env}/hard", "share", "groups since the previous step whose example moved to the "
               "hard pool"),
    ),
    "Age": (
        Metric("staleness/mean", "steps", "mean age of the batch's rollouts that are not too old, including filtered "
               "ones: the batch's number minus the policy version of the first token",
               see="asynchrony.md#what-to-look-at"),
        Metric("staleness/max", "steps", "age of the oldest of these rollouts"),
        Metric("staleness/age/{a}", "rollouts", "number of rollouts with age a"),
        Metric("staleness/dropped", "rollouts", "rollouts dropped as too old since the previous step, while they "
               "waited for a batch or when it was built"),
    ),
    "Training": (
        Metric("loss", "", "the loss divided by its normaliser; like grad_norm and lr, NaN if no optimizer step was "
               "taken"),
        Metric("grad_norm", "", "norm of the gradient before clipping, averaged over the optimizer steps"),
        Metric("lr", "", "the learning rate of the last optimizer step"),
        Metric("entropy", "nats", "mean entropy of the policy's distribution at the trained tokens"),
        Metric("mismatch_kl", "nats", "estimated KL between the policies of sampler and trainer: "
               "mean(w - log w - 1) over trained tokens, w = exp(trainer logprob - inference logprob)"),
        Metric("ref_kl", "nats", "with a reference model: estimated KL between policy and reference, "
               "mean(exp(r - l) - (r - l) - 1) over trained tokens, with the logprobs r of the reference and l of the "
               "trainer",
               see="algorithms.md#a-reference"),
        Metric("trained_tokens", "tokens", "targets whose gradient was taken"),
        Metric("num_optimizer_steps", "optimizer steps", "optimizer steps on the batch"),
        Metric("num_micro_batches", "forward passes", "forward passes of the batch"),
        Metric("num_tokens", "tokens", "tokens computed"),
        Metric("packing/sample_tokens", "tokens", "tokens of the samples, all of which would be computed if they were "
               "packed in rows", see="performance.md"),
        Metric("packing/repeated_tokens", "tokens", "tokens computed more than once because a tree was cut"),
        Metric("packing/tree", "share", "computed tokens that were in trees"),
        Metric("packing/fallback", "", "1 if trees gave wrong results and rows are used instead"),
        Metric("seconds", "seconds", "time that the trainer spent on the batch"),
        Metric("tokens_per_second", "tokens per second", "tokens that the trainer computed per second"),
        Metric("policy_version", "", "policy version of the published weights"),
        Metric("trainer/restarts", "restarts", "restarts after lost ranks",
               see="operations.md#on-a-ray-cluster"),
        Metric("trainer/replayed_batches", "batches", "batches trained again in this step"),
        Metric("router/replayed", "share", "with recorded routing: trained tokens that are predicted from a token with "
               "recorded experts", see="experts.md#recorded-routing"),
        Metric("router/aux_loss", "", "the load-balancing loss, before its coefficient",
               see="experts.md#the-load-balancing-loss"),
        Metric("router/load_max", "", "tokens of the busiest expert divided by its layer's mean, maximum over layers"),
        Metric("router/entropy", "nats", "mean entropy of a token's router probabilities"),
    ),
    "Losses": (
        Metric("importance_ratio_mean", "", "mean of exp(trainer logprob - inference logprob), for losses that read "
               "both", see="algorithms.md"),
        Metric("importance_ratio_min", "", "smallest importance ratio"),
        Metric("importance_ratio_max", "", "largest importance ratio"),
        Metric("masked_by_loss", "tokens", "tokens whose policy gradient the loss masked"),
        Metric("dppo_dropped_low", "share", "default: trained tokens masked because they became too unlikely"),
        Metric("dppo_dropped_high", "share", "default: trained tokens masked because they became too likely"),
        Metric("clipped_low", "share", "trained tokens whose ratio is clipped from below; gspo: tokens of clipped "
               "trajectories"),
        Metric("clipped_high", "share", "trained tokens whose ratio is clipped from above"),
        Metric("sequence_ratio_mean", "", "gspo: mean ratio of whole trajectories"),
        Metric("sequence_ratio_min", "", "gspo: smallest ratio of a trajectory"),
        Metric("sequence_ratio_max", "", "gspo: largest ratio of a trajectory"),
        Metric("chunk_ratio_mean", "", "ipa: mean ratio of chunks, the sampled tokens of one turn"),
        Metric("chunk_ratio_min", "", "ipa: smallest ratio of a chunk"),
        Metric("chunk_ratio_max", "", "ipa: largest ratio of a chunk"),
        Metric("chunks_dropped", "share", "ipa: chunks that are masked"),
        Metric("teacher_kl", "nats", "with a teacher: mean of trainer logprob - teacher logprob over trained tokens"),
    ),
    "Ledger": (
        Metric("ledger/sampled", "tokens", "tokens sampled since the run began: sampled = trained + pending + dropped"),
        Metric("ledger/trained", "tokens", "tokens that were trained"),
        Metric("ledger/pending", "tokens", "tokens of episodes in flight and of groups that wait to be trained"),
        Metric("ledger/masked_by_loss", "tokens", "trained tokens whose policy gradient the loss masked"),
        Metric("ledger/dropped/{reason}", "tokens", "tokens that are never trained, by reason",
               see="trajectories.md"),
    ),
    "Time": (
        Metric("time/step", "seconds", "time from one finished step to the next", see="asynchrony.md#what-to-look-at"),
        Metric("time/sampler_idle", "seconds", "idle time of the sampler in the step"),
        Metric("time/trainer_idle", "seconds", "idle time of the trainer in the step; the side that is idle longer "
               "waits for the other"),
        Metric("time/wait_for_batch", "seconds", "time that the orchestrator waited for rollouts"),
        Metric("time/wait_for_trainer", "seconds", "time that the orchestrator waited for the trainer's response"),
        Metric("time/weight_sync", "seconds", "time that the sampler took to load and check a version of the weights"),
        Metric("time/weight_broadcast", "seconds", "time of the trainer's weight broadcast, if it has one",
               see="vllm.md#weights-from-the-trainers-devices"),
        Metric("time/weight_meeting", "seconds", "part of the broadcast's time until all servers had joined the group"),
        Metric("time/sampler_falling_asleep", "seconds", "with a device handoff: from handing over a batch until the "
               "sampler has left the device", see="vllm.md#one-gpu"),
        Metric("time/sampler_asleep", "seconds", "with a device handoff: from then until the trainer has left the "
               "device"),
        Metric("time/trainer_moving", "seconds", "with a device handoff: copying the trainer to the device and back"),
        Metric("loop/lag_mean", "seconds", "mean delay of the event loop"),
        Metric("loop/lag_max", "seconds", "largest delay of the event loop"),
    ),
    "Queues and workers": (
        Metric("queue/groups_in_flight", "groups", "groups that are being sampled, or wait to be"),
        Metric("queue/groups_ready", "groups", "groups that wait for a batch"),
        Metric("queue/batches_submitted", "batches", "batches that the trainer has or will get"),
        Metric("sampler/tokens_per_second", "tokens per second", "sampled tokens per second of the time in which the "
               "sampler was busy"),
        Metric("rollout/workers", "processes", "processes or Ray actors in which episodes run",
               see="rollouts.md#in-processes-of-this-machine"),
        Metric("rollout/workers_lost", "processes", "workers lost since the start"),
        Metric("rollout/workers_lost/{env}", "processes", "workers lost since the start, by environment, if episodes "
               "run in processes"),
        Metric("rollout/episodes_rerun", "episodes", "episodes started again because a worker was lost"),
    ),
    "Weights": (
        Metric("weights/bytes", "bytes", "size of the published weights"),
        Metric("weights/canary", "nats", "mean difference between the sampler's and the trainer's logprobs on the "
               "canary's probes, for the replica with the largest difference",
               see="asynchrony.md#the-canary"),
        Metric("weights/canary_allowed", "nats", "the largest difference allowed: inference.canary_tolerance, or the "
               "difference that rounding explains", see="asynchrony.md#the-canary"),
        Metric("weights/broadcast", "", "if the trainer broadcasts its weights: 1 if all servers of the group received "
               "the version, else 0", see="vllm.md#weights-from-the-trainers-devices"),
        Metric("weights/broadcast_bytes", "bytes", "size of the broadcast, which all servers receive at once"),
    ),
    "Replicas of the sampler": (
        Metric("replica/{i}/serving", "", "1 if the replica takes requests, else 0"),
        Metric("replica/{i}/policy_version", "", "the last policy version whose check the replica passed"),
        Metric("replica/{i}/restarts", "restarts", "number of restarts of the replica"),
        Metric("replica/{i}/unverified_tensors", "tensors", "tensors of its current weights that are covered "
               "by the canary but not by a digest", see="vllm.md#how-a-weight-update-is-verified"),
        Metric("replica/{i}/in_flight", "requests", "requests that the run has sent to the replica"),
        Metric("replica/{i}/running", "requests", "requests in the batch of the replica's server, as it reports them"),
        Metric("replica/{i}/waiting", "requests", "requests in the queue of the replica's server"),
        Metric("replica/{i}/kv_usage", "share", "part of the key/value cache that is in use"),
        Metric("replica/{i}/tokens_per_second", "tokens per second", "tokens that the replica sampled per "
               "second since the previous step"),
        Metric("replica/{i}/prefix_cache_hit_rate", "share", "prompt tokens found in the prefix cache"),
        Metric("replica/{i}/waking_seconds", "seconds", "with a device handoff: time of the last wake-up, without "
               "loading weights", see="vllm.md#one-gpu"),
        Metric("replicas/{figure}/min", "", "with more than 32 replicas, instead of metrics for each: the lowest value "
               "of all replicas"),
        Metric("replicas/{figure}/mean", "", "with more than 32 replicas: the mean of all replicas"),
        Metric("replicas/{figure}/max", "", "with more than 32 replicas: the highest value of all replicas"),
        Metric("replicas/serving", "replicas", "replicas that take requests"),
        Metric("replicas/lost", "replicas", "replicas lost since the start of this process"),
        Metric("replicas/restarts", "restarts", "restarts since the start of this process"),
        Metric("replicas/failed_checks", "checks", "checks that found wrong weights"),
        Metric("replicas/requests_waiting", "requests", "requests that wait because all replicas are full"),
        Metric("replicas/requests_moved", "requests", "requests sent to another replica than the one with their prefix "
               "in its cache"),
        Metric("replicas/requests_failed", "requests", "requests that failed on a replica that is still alive"),
        Metric("replicas/requests_resent", "requests", "requests to the sampler that were sent again"),
        Metric("replicas/requests_lost", "requests", "requests of lost replicas for which the number of sampled tokens "
               "is unknown, so that these are not counted"),
        Metric("replicas/tokens_lost", "tokens", "tokens known to be lost with a replica; in training they are "
               "ledger/dropped/lost_replica"),
    ),
    "Evaluation": (
        Metric("examples", "examples", "examples of the evaluation, each played equally often"),
        Metric("episodes", "episodes", "episodes of the evaluation; 0 if it was skipped because examples failed"),
        Metric("failed", "episodes", "episodes that failed with an error; they count as unsuccessful"),
        Metric("success/low", "share", "lower end of the 95% interval of success", see="evaluation.md#intervals"),
        Metric("success/high", "share", "upper end of the 95% interval of success"),
        Metric("reward/low", "reward", "lower end of the 95% interval of reward/mean; NaN if all rewards are equal"),
        Metric("reward/high", "reward", "upper end of the 95% interval of reward/mean; NaN if all rewards are equal"),
        Metric("reward_part/{part}/mean", "reward", "mean of a named reward part"),
        Metric("reward_part/{part}/std", "reward", "standard deviation of a named reward part"),
        Metric("agent_reward/{agent}/mean", "reward", "mean reward of one agent, if score returned AgentScores"),
        Metric("agent_reward/{agent}/std", "reward", "standard deviation of the reward of one agent"),
    ),
}  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(
    Metric(metric.name, metric.unit, metric.about, group, metric.see)
    for group, metrics in _GROUPS.items()
    for metric in metrics
)
"""All metrics, in the order of docs/metrics.md. Losses, filters and judges that users write may report further
metrics."""


def about(name: str) -> Metric | None:
    """The metric with this name; None if it is not listed.

    >>> about("filters/zero_advantage/flagged").unit
    'rollouts'
    """
    return _BY_NAME.get(name) or next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def descriptions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """`{name: {"unit": ..., "about": ..., "group": ...}}` for each of the names that is listed in `METRICS`."""
    found = ((name, about(name)) for name in names)
    return {
        name: {"unit": metric.unit, "about": metric.about, "group": metric.group} for name, metric in found if metric
    }


_BY_NAME = {metric.name: metric for metric in METRICS}


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    """The pattern of each metric family. A placeholder also matches slashes, because names of environments may contain
    them."""
    return tuple(
        (re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(metric.name))), metric)
        for metric in METRICS
        if "{" in metric.name
    )
