/** What became of a trajectory or a turn: a word and a colour. */
import { percent } from "../format";
import type { Row } from "../types";
import { Text } from "./text";

const REASONS = ["difficulty", "stale", "error", "missing_logprobs", "untrained", "over_length", "cancelled", "lost_worker",
  "lost_replica", "unused_at_end", "evaluation"];

/** The number of a outcome's colour: 0 trained, then the reasons in an order that does not change; filters share 1. */
export function outcomeColour(outcome: string): number {
  if (outcome === "trained") return 0;
  if (outcome.startsWith("filter:")) return 1;
  const at = REASONS.indexOf(outcome);
  return at < 0 ? 6 : [2, 3, 4, 5, 6, 5, 6, 6, 6, 6, 6][at] ?? 6;
}

export function TrajectoryOutcome({ outcome }: { outcome: string }) {
  return <span class={`outcome f${outcomeColour(outcome)}`}><Text value={outcome} /></span>;
}

export function RowOutcome({ row }: { row: Row }) {
  if (row.reason) return <TrajectoryOutcome outcome={row.reason} />;
  const { num_trained_tokens: trained, num_sampled_tokens: sampled } = row;
  if (sampled === 0) return <span class="none">nothing sampled</span>;
  if (trained === sampled) return <TrajectoryOutcome outcome="trained" />;
  return <span class="outcome f0" title={`${trained} of ${sampled} tokens`}>{percent(trained / sampled)} trained</span>;
}

/** What a outcome means. */
export const OUTCOME_MEANS: Record<string, string> = {
  trained: "part of an optimizer step",
  evaluation: "sampled to measure the policy: never trained",
  difficulty: "its group's rewards were all equal (online difficulty filtering)",
  stale: "too old when its batch was built (max_off_policy_steps)",
  error: "its episode failed",
  missing_logprobs: "the sampler gave no logprobs",
  untrained: "of an agent that is not trained",
  over_length: "longer than a sample may be (seq_len)",
  cancelled: "in flight when the run stopped",
  lost_worker: "its worker was lost",
  lost_replica: "its replica of the sampler was lost",
  unused_at_end: "sampled for a batch that the run did not need",
};
