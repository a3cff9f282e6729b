"""The built-in alarms, one row each.

In the texts, `{dropped:.0%}` is a value of the condition or a parameter, `{time/step:.1f}` is a metric of the step, and
`{trainer.optim.lr}` is a configuration key, which is shown with its current value.
"""

from __future__ import annotations

from collections.abc import Mapping

from verbatim.logs.monitors.alarms import conditions, figures, reward_conditions
from verbatim.logs.monitors.alarms.engine import KEPT_EVALUATIONS, KEPT_STEPS, AlarmRow, Why
from verbatim.logs.monitors.alarms.rule import TOOL

_WINDOW = {"steps": (1, KEPT_STEPS)}
_COMPARES = {"steps": (1, KEPT_STEPS // 2)}
"""Limits for an alarm that compares steps with the same number of earlier steps."""
_COMPARES_RANKS = {"steps": (7, KEPT_STEPS // 2)}
"""Limits for an alarm with a rank test. With 6 steps no change can be significant: by chance alone, 6 values all exceed
6 others once in C(12, 6) = 924 times, which is more often than once in 1,000 (`change.SURE`)."""

_OFF_POLICY = {
    "other weights": Why(
        cause="the sampler does not have the trainer's weights: their logprobs differ by {weights/canary:.3g} on the "
        "canary",
        advice="lower {inference.canary_tolerance}, so that the run stops there, and check the sampler's log for "
        "weights that were not loaded",
    ),
    "cut distribution": Why(
        cause="tokens are sampled from a distribution cut by top_p, top_k or min_p, but scored under the full "
        "distribution",
        advice="remove {orchestrator.sampling.accept_truncation_mismatch} and use a sampler that returns the kept ids "
        "(the embedded one), or remove top_p, top_k and min_p",
    ),
    "old rollouts": Why(
        cause="rollouts are {staleness/mean:.2f} steps old",
        advice="lower {orchestrator.max_async_level} or {orchestrator.max_off_policy_steps}",
    ),
    "precision": Why(
        cause="sampler and trainer compute different logprobs for the same tokens, even at the first step, "
        "before any update",
        advice="compare {trainer.dtype} with the precision of the sampler (inference.torch.dtype, "
        "inference.vllm.dtype); with a mixture of experts, record its routing",
    ),
    "optimizer steps": Why(
        cause="every optimizer step on a batch except the first is off-policy",
        advice="set {trainer.optimizer_steps_per_batch} to 1, or lower {trainer.optim.lr}",
    ),
    "": Why(
        cause="the policy moves too far in a step",
        advice="lower {trainer.optim.lr} to a third, or lower {trainer.optim.max_grad_norm}",
    ),
}
_OLD = (
    "lower orchestrator.max_concurrent or max_turns so that episodes end sooner, or lower "
    "{orchestrator.max_async_level}; if staleness/max is at {orchestrator.max_off_policy_steps} and few are dropped, "
    "the age may be accepted"
)
_SLOW = "episodes take several steps, or the trainer is much faster than the sampler"
_MORE = "raise {orchestrator.max_concurrent}, or lower {orchestrator.episode_timeout}"
_IDLE = "{waits:.0%} of a step, {idle:.1f} s of {step:.1f} s (medians of {steps} steps)"
_TIMES = ("time/step", "time/sampler_idle", "time/trainer_idle", "time/wait_for_batch", "time/wait_for_trainer")

_ROWS = (
    AlarmRow(
        name="reward_hacking",
        function=reward_conditions.reward_hacking,
        parameters={
            "growth": 2.0,
            "repetition": 0.2,
            "tool_growth": 3.0,
            "tool_calls": 3.0,
            "rise": 0.25,
            "credit": 0.3,
            "steps": 8,
        },
        limits=_COMPARES_RANKS,
        message="the reward of {env} rose from {reward_was:.3g} to {reward:.3g}, and {seen} (medians of {steps} "
        "steps); within groups it correlates with the reward by {correlation with the reward:.2f}",
        why={
            kind: Why(
                seen=seen,
                cause="the reward can be earned by more of this instead of by solving the task",
                advice=f"read these rollouts; {advice}",
            )
            for kind, seen, advice in (
                (
                    "tokens_per_turn",
                    "the tokens per turn went from {was:.0f} to {now:.0f}",
                    'set {orchestrator.length_penalty.type} to "tokens" with a target, lower '
                    "{orchestrator.sampling.max_tokens}, and remove length from the reward",
                ),
                (
                    "repetition",
                    "the share of repeated 4-grams went from {was:.0%} to {now:.0%}",
                    "keep the filter `repetition`, lower {orchestrator.sampling.max_tokens}, and stop rewarding the "
                    "repeated text",
                ),
                (
                    TOOL,
                    "the calls of the tool {tool} went from {was:.1f} to {now:.1f} per rollout",
                    "reward the result instead of the calls, or penalise each call with "
                    '{orchestrator.length_penalty.type} = "turns"; limit them by max_turns',
                ),
            )
        },
        trajectories=figures.most_of,
    ),
    AlarmRow(
        name="reward_success_gap",
        function=reward_conditions.reward_success_gap,
        parameters={"rise": 0.2, "fall": 0.1, "steps": 8},
        limits=_COMPARES_RANKS,
        message="the reward of {env} rose from {reward before:.3g} to {now:.3g} while its success fell from "
        "{success before:.2f} to {success:.2f} (medians of {steps} steps)",
        why=Why(
            cause="the reward can be earned without solving the task",
            advice="read these episodes, and change what `score` rewards; {parts}the run can continue from a "
            "checkpoint before the two diverged",
        ),
        trajectories=figures.paid_without_success,
    ),
    AlarmRow(
        name="evaluation_flat",
        function=reward_conditions.evaluation_flat,
        parameters={"rise": 0.1, "evaluations": 4, "solved": 0.9},
        limits={"evaluations": (1, KEPT_EVALUATIONS)},
        on_evaluations=True,
        message="from step {began} to {step} training success rose from {success of training before:.2f} to "
        "{success of training:.2f}, while evaluation success on {env} went from "
        "{success of evaluation before:.2f} to {success of evaluation:.2f}",
        why=Why(
            cause="the policy memorises the training examples, or earns a reward that the evaluation does not give",
            advice="use more or other training examples, and continue from an earlier checkpoint "
            "({checkpoint.keep_every}); {orchestrator.eval.interval} sets how often the policy is evaluated",
        ),
    ),
    AlarmRow(
        name="evaluation_drop",
        function=reward_conditions.evaluation_drop,
        parameters={"fall": 0.1, "reward_fall": 0.2},
        on_evaluations=True,
        message="the {what} in the evaluation of {env} fell from {was:.3g} (the best, at step {began}) to {now:.3g} "
        "(95% intervals {intervals})",
        why={
            "failed": Why(
                cause="{failed_share:.0%} of its episodes failed, and {failed_before:.0%} of those of the best "
                "evaluation",
                advice="check the errors of these episodes (evaluations/ in the run folder); the policy may be fine",
            ),
            "training": Why(
                cause="the policy learns the training examples at the cost of others: training success did not fall "
                "({training_before:.2f} to {training/success:.2f})",
                advice="continue from the checkpoint at step {began} or before ({checkpoint.keep_every}) with more or "
                "other training examples, or lower {trainer.optim.lr}",
            ),
            "": Why(
                cause="updates have made the policy worse; alarms of the steps since then may show why",
                advice="continue from the checkpoint at step {began} or before ({checkpoint.keep_every}) and lower "
                "{trainer.optim.lr} or {trainer.optim.max_grad_norm}",
            ),
        },
    ),
    AlarmRow(
        name="entropy_collapse",
        function=conditions.entropy_collapse,
        parameters={"share": 0.05, "solved": 0.9, "steps": 8},
        limits=_COMPARES,
        message="entropy is {entropy:.3g}, {left:.1%} of the first steps' {entropy of the first steps:.3g}, while "
        "success is {success:.2f} and the reward no longer rises",
        why=Why(
            cause="the policy has stopped exploring: all rollouts of a group are the same, so there is nothing to "
            "learn from",
            advice="go back to a checkpoint before the fall and lower {trainer.optim.lr}; keep "
            "{orchestrator.sampling.temperature} at 1.0; raise {orchestrator.group_size}",
        ),
    ),
    AlarmRow(
        name="mismatch_kl",
        function=conditions.mismatch_kl,
        parameters={"bound": 0.05, "steps": 8},
        limits=_WINDOW,
        message="mismatch_kl is {value:.3g}, the median of {steps} steps; the bound is {bound:g}",
        why=_OFF_POLICY,
        evidence=("mismatch_kl", "importance_ratio_max", "staleness/mean", "weights/canary"),
        trajectories=figures.furthest,
    ),
    AlarmRow(
        name="masked_tokens",
        function=conditions.masked_tokens,
        parameters={"share": 0.1, "steps": 8},
        limits=_WINDOW,
        message="the loss masks {value:.1%} of the trained tokens, the median of {steps} steps; the bound is "
        "{share:.1%}",
        why=_OFF_POLICY,
        evidence=("masked_by_loss", "trained_tokens", "mismatch_kl", "staleness/mean"),
        trajectories=figures.furthest,
    ),
    AlarmRow(
        name="staleness",
        function=conditions.staleness,
        parameters={"beyond": 1.0, "dropped": 0.1, "steps": 5},
        limits=_WINDOW,
        message="rollouts are {age:.2f} steps old when they are trained, with {asked:g} configured, and {lost:.1%} "
        "are dropped as too old (medians of {steps} steps)",
        why={
            "stuck": Why(
                cause="rollouts of {oldest} are still sampled by version 0 at step {step}: new weights do not reach "
                "its sampler",
                advice="check weights/canary and the sampler's log for weights that were not loaded, and resume "
                "the run once they are ({inference.backend})",
            ),
            "slow": Why(cause=f"{_SLOW}; the oldest is of {{oldest}}, sampled by version {{version}}", advice=_OLD),
            "": Why(cause=_SLOW, advice=_OLD),
        },
        evidence=("staleness/mean", "staleness/max", "staleness/dropped", "policy_version", "time/weight_sync"),
        trajectories=figures.oldest,
    ),
    AlarmRow(
        name="kept_set_bytes",
        function=conditions.kept_set_bytes,
        parameters={"bound": 1000.0, "steps": 8},
        limits=_WINDOW,
        message="kept sets take {value:,.0f} bytes per trained token, the median of {steps} steps; the bound is "
        "{bound:,.0f}",
        why=Why(
            cause="top_p and min_p keep many ids where the distribution is flat",
            advice="set {orchestrator.sampling.top_k} to 100, or lower {orchestrator.sampling.temperature}",
        ),
        evidence=("kept_ids/mean", "kept_ids/max", "kept_ids/cut", "entropy"),
    ),
    AlarmRow(
        name="tool_format",
        function=conditions.tool_format,
        parameters={"share": 0.3, "gone": 0.5, "steps": 3},
        limits=_WINDOW,
        message="{seen}",
        why={
            "parser": Why(
                seen="in {like:.0%} of the rollouts of {env} no call was read, though their text looks like calls; "
                "{called:.0%} have a readable one",
                cause="the parser does not fit the format in which the model writes calls",
                advice="set {orchestrator.renderer.name} to the model's family, or {orchestrator.renderer.tools} to "
                '"hermes"; `verbatim doctor --template MODEL` shows what is parsed',
            ),
            "cut off": Why(
                seen="in {unread:.0%} of the turns of {env} the calls cannot be read",
                cause="calls are cut off",
                advice="raise {orchestrator.sampling.max_tokens}",
            ),
            "unreadable": Why(
                seen="in {unread:.0%} of the turns of {env} the calls cannot be read",
                cause="the model no longer writes calls in its template's format",
                advice="if they are cut off, raise {orchestrator.sampling.max_tokens}; otherwise lower "
                "{trainer.optim.lr}, or begin with a [warm_start] on demonstrations",
            ),
            "gone": Why(
                seen="{called:.0%} of the rollouts of {env} have a readable call; in the first steps {before:.0%} had "
                "one, and the reward has not risen",
                cause="the policy has unlearned how to call tools",
                advice="go back to a checkpoint before that and lower {trainer.optim.lr}; check what rollouts without "
                "calls are rewarded for",
            ),
        },
        evidence=("valid_format", "tool_calls", "malformed", "truncated"),
        trajectories=figures.without_a_call,
    ),
    AlarmRow(
        name="prompt_breaks",
        function=conditions.prompt_breaks,
        parameters={"share": 0.2, "steps": 3},
        limits=_WINDOW,
        message="{broken:.0%} of the later turns of {env} do not extend a sample, so each of them is a separate sample "
        "that repeats the history",
        why=Why(cause="{cause}", advice="{advice}"),
        evidence=("breaks", "samples", "rollouts"),
        trajectories=figures.broken,
    ),
    AlarmRow(
        name="everything_filtered",
        function=conditions.everything_filtered,
        parameters={"share": 0.95, "solved": 0.9, "rollouts": 100, "steps": 3},
        limits=_WINDOW,
        message="{dropped:.0%} of the last {completed:.0f} rollouts of {env}, in {counted} steps, were dropped, mostly "
        "as {reason}; success is {success:.2f}",
        why={
            "filter:zero_advantage": Why(
                cause="all rollouts of a group earn the same reward, so every advantage is 0",
                advice="give partial reward or use examples that are sometimes solved; raise "
                "{orchestrator.group_size}; or set {orchestrator.buffer.online_difficulty_filtering}",
            ),
            "difficulty": Why(
                cause="the examples are too easy or too hard: online difficulty filtering drops groups of equal "
                "rewards",
                advice="use other examples, raise {orchestrator.group_size}, or keep examples in the normal pool with "
                "{orchestrator.buffer.easy_threshold} and {orchestrator.buffer.hard_threshold}",
            ),
            "filter:gibberish": Why(
                cause="the mean logprob of the sampled tokens is very low: the model has random weights, or the policy "
                "has collapsed",
                advice="give the model a [warm_start]; if a policy that worked has collapsed, go back to a "
                "checkpoint and lower {trainer.optim.lr}",
            ),
            "filter:repetition": Why(
                cause="the model repeats itself",
                advice="lower {orchestrator.sampling.max_tokens} and {trainer.optim.lr}, and read some episodes before "
                "the filter's threshold is raised",
            ),
            "filter:truncated": Why(
                cause="nearly every rollout is cut off before it ends",
                advice="raise {orchestrator.sampling.max_tokens}, {orchestrator.seq_len} or the environment's "
                "max_turns; or remove the filter, so that rollouts that were cut off are trained",
            ),
            "over_length": Why(
                cause="rollouts exceed the length of a training sample", advice="raise {orchestrator.seq_len}"
            ),
            "missing_logprobs": Why(
                cause="the server returns no logprobs",
                advice="use a server that returns them (`verbatim serve`, or {inference.backend})",
            ),
            "": Why(cause="rollouts are dropped for the reason {reason}", advice="check ledger/dropped/{reason}"),
        },
        trajectories=figures.untrained,
    ),
    AlarmRow(
        name="pools_dry",
        function=conditions.pools_dry,
        parameters={"left": 0.05},
        message="{normal:.1%} of the examples of {env} are still sampled; {easy:.1%} are in the easy pool and "
        "{hard:.1%} in the hard one",
        why={
            "easy": Why(
                cause="the examples are solved",
                advice="give harder or more examples; or change {orchestrator.buffer.easy_threshold}, and let examples "
                "come back with {orchestrator.buffer.easy_fraction}",
            ),
            "hard": Why(
                cause="the examples are too hard for the policy",
                advice="give easier or more examples; or change {orchestrator.buffer.hard_threshold}, and let examples "
                "come back with {orchestrator.buffer.hard_fraction}",
            ),
        },
    ),
    AlarmRow(
        name="environment_starves",
        function=conditions.environment_starves,
        parameters={"share": 0.25, "steps": 8},
        limits=_WINDOW,
        message="{usable:.0f} rollouts of {env} in {counted} steps could be trained; according to its ratio, "
        "{expected:.0f} were expected",
        why={
            "failed": Why(
                cause="{failed:.0f} of its {rollouts:.0f} rollouts failed",
                advice="check the alarm repeated_error and errors/{{kind}}; the log has the first traceback",
            ),
            "stale": Why(
                cause="its rollouts are dropped as too old: its episodes take longer than the others', or new weights "
                "do not reach its sampler (then the alarm staleness is raised too)",
                advice="raise {orchestrator.max_off_policy_steps}, or shorten its episodes (max_turns)",
            ),
            "": Why(
                cause="its episodes take much longer than the others', so that others fill the batches",
                advice="shorten its episodes (max_turns), raise {orchestrator.max_concurrent}, or raise its ratio in "
                "[[orchestrator.train.env]]",
            ),
        },
        trajectories=figures.untrained,
    ),
    AlarmRow(
        name="repeated_error",
        function=conditions.repeated_error,
        parameters={"share": 0.2, "rollouts": 8, "steps": 3},
        limits=_WINDOW,
        message="{count} of {total:.0f} rollouts of {env} in {counted} steps failed with: {kind}{others}",
        why={
            kind: Why(cause="episodes of {env} fail in the same way", advice=advice)
            for kind, advice in (
                (
                    "environment",
                    "its code raised: run `verbatim env check` on it; the log has the first traceback of each kind",
                ),
                ("judge", "the judge gave no verdict: check its server, its prompt and its limits"),
                (
                    "template",
                    "the chat template failed: `verbatim doctor --template MODEL` tests it; see "
                    "{orchestrator.renderer.name}",
                ),
                (
                    "sampler",
                    "the inference engine failed on these requests: check its log; lower {orchestrator.max_concurrent}",
                ),
                (
                    "timeout",
                    "raise {orchestrator.episode_timeout}, or shorten its episodes (max_turns); a tool that "
                    "hangs has {orchestrator.tool_timeout}",
                ),
                ("record", "the server's response has no valid record of tokens: check its version and its options"),
                (
                    "reward",
                    "score returned a reward that cannot be trained on: missing, infinite or not a number",
                ),
                ("advantage", "the advantage function raised on these groups: check {orchestrator.advantage.type}"),
                (
                    "worker",
                    "worker processes were lost: their memory limit is orchestrator.rollout.processes.worker_memory_mb",
                ),
                ("", "check the log, which has the first traceback of each kind"),
            )
        },
        trajectories=figures.failed,
    ),
    AlarmRow(
        name="sampler_idle",
        function=conditions.sampler_idle,
        parameters={"share": 0.8, "seconds": 10.0, "steps": 8},
        limits=_WINDOW,
        message=f"the sampler waits {_IDLE}",
        why=Why(
            cause="the trainer is the slower side",
            advice="give the trainer more processes ({trainer.parallel.processes}) or a lower precision "
            "({trainer.dtype}); or let the sampler run ahead: raise {orchestrator.max_async_level}",
        ),
        evidence=_TIMES,
    ),
    AlarmRow(
        name="trainer_idle",
        function=conditions.trainer_idle,
        parameters={"share": 0.8, "seconds": 10.0, "steps": 8},
        limits=_WINDOW,
        message=f"the trainer waits {_IDLE}",
        why={
            "teacher": Why(
                cause="the teacher's server is the slower side, or single episodes take much longer than the rest",
                advice=f"give the teacher's server more replicas or devices, {_MORE}",
            ),
            "both wait": Why(
                cause="the sampler waits as much: episodes wait for their tools, their judge or their environment",
                advice=f"make these faster, {_MORE}",
            ),
            "": Why(
                cause="the sampler is the slower side, or single episodes take much longer than the rest",
                advice=f"give the sampler more replicas or devices ([inference.{{backend}}]), {_MORE}",
            ),
        },
        evidence=_TIMES,
    ),
)

ALARMS: Mapping[str, AlarmRow] = {row.name: row for row in _ROWS}
"""The alarms by the name of their configuration table, [monitor.alarms.NAME], whose keys are the alarm's parameters.
All alarms are on by default."""
