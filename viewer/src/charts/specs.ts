/** Which curves the overview draws, from the metrics that a run has. */
import type { Column, Metrics } from "../metrics";

export interface Series {
  metric: string;
  label: string;
}

export interface Spec {
  id: string;
  title: string;
  unit: string;
  series: Series[];
  /** Limits of the vertical axis that do not follow the data. */
  low?: number;
  high?: number;
  /** A step without a value had none of it. */
  zero?: boolean;
}

export interface Section {
  title: string;
  charts: Spec[];
}

type Limits = Pick<Spec, "low" | "high" | "zero">;

/** One curve, named like its card. */
function one(id: string, title: string, metric: string, unit = "", limits: Limits = {}): Spec {
  return { id, title, unit, series: [{ metric, label: title.toLowerCase() }], ...limits };
}

function several(id: string, title: string, pairs: [string, string][], unit = "", limits: Limits = {}): Spec {
  return { id, title, unit, series: pairs.map(([metric, label]) => ({ metric, label })), ...limits };
}

/** A curve for each metric `before{name}after`, of which there can be several. */
function each(names: string[], pattern: RegExp): [string, string][] {
  return names.flatMap((name) => {
    const match = pattern.exec(name);
    return match?.[1] === undefined ? [] : [[name, match.slice(1).filter(Boolean).join(" ")] as [string, string]];
  });
}

/** The overall curve, and with several environments one for each. */
function withEnvironments(names: string[], title: string, overall: string, pattern: RegExp): [string, string][] {
  const own = each(names, pattern);
  return [[overall, own.length > 1 ? "all" : title.toLowerCase()], ...(own.length > 1 ? own : [])];
}

const SHARE = { low: 0, high: 1 };

export function sections(names: string[]): Section[] {
  const all: Section[] = [
    {
      title: "Learning",
      charts: [
        several("reward", "Reward", withEnvironments(names, "Reward", "reward/mean", /^reward\/(.+)\/mean$/)),
        several("success", "Success", withEnvironments(names, "Success", "success", /^success\/(.+)$/), "share", SHARE),
        several("parts", "Parts of the reward", each(names, /^reward_part\/(.+)\/mean$/)),
        several("agents", "Rewards of agents", each(names, /^agent_reward\/(.+)\/mean$/)),
      ],
    },
    {
      title: "Episodes",
      charts: [
        one("length", "Length", "completion_tokens", "tokens", { low: 0 }),
        several("turns", "Turns", [["turns", "turns"], ["tool_calls", "tool calls"]], "per episode", { low: 0 }),
        several("stops", "How episodes end", [["truncated", "cut off"], ["malformed", "unreadable call"],
          ["rollouts/failed_share", "failed"], ...each(names, /^stop_reason\/(.+)$/)], "share", { low: 0 }),
        one("format", "Valid tool calls", "valid_format", "share", { high: 1 }),
        one("tool_errors", "Tool errors", "tool_errors", "per episode", { low: 0 }),
        several("errors", "Errors", each(names, /^errors\/(.+)$/), "episodes", { low: 0, zero: true }),
        one("breaks", "Breaks", "breaks", "turns", { low: 0 }),
      ],
    },
    {
      title: "Training",
      charts: [
        one("kl", "Mismatch KL", "mismatch_kl", "nats", { low: 0 }),
        one("grad_norm", "Gradient norm", "grad_norm", "before clipping", { low: 0 }),
        one("entropy", "Entropy", "entropy", "nats", { low: 0 }),
        one("loss", "Loss", "loss"),
        several("ratio", "Importance ratio", [["importance_ratio_mean", "mean"], ["importance_ratio_min", "min"],
          ["importance_ratio_max", "max"]]),
        several("masked", "Masked by the loss", [["masked_by_loss", "all"], ["dppo_dropped_low", "too low"],
          ["dppo_dropped_high", "too high"]], "tokens", { low: 0 }),
        one("ref_kl", "KL to the reference", "ref_kl", "nats", { low: 0 }),
        one("lr", "Learning rate", "lr", "", { low: 0 }),
      ],
    },
    {
      title: "Filters and pools",
      charts: [
        several("filters", "Filtered rollouts", each(names, /^filters\/(.+)\/dropped$/), "rollouts", { low: 0, zero: true }),
        several("flagged", "Flagged rollouts", each(names, /^filters\/(.+)\/flagged$/), "rollouts", { low: 0, zero: true }),
        several("difficulty", "Filtered by difficulty", each(names, /^filtered_rollouts\/(.+)\/(easy|hard|flat)$/),
          "rollouts", { low: 0 }),
        several("pools", "Pools", each(names, /^pool\/(.+)\/(easy|normal|hard)$/), "share of examples", SHARE),
      ],
    },
    {
      title: "Time and staleness",
      charts: [
        several("staleness", "Staleness", [["staleness/mean", "mean"], ["staleness/max", "max"]], "versions", { low: 0 }),
        one("stale", "Dropped as too old", "staleness/dropped", "rollouts", { low: 0 }),
        several("speed", "Speed", [["sampler/tokens_per_second", "sampler"], ["tokens_per_second", "trainer"]],
          "tokens per second", { low: 0 }),
        one("step_time", "Time of a step", "time/step", "seconds", { low: 0 }),
        several("queue", "Queues", [["queue/groups_in_flight", "in flight"], ["queue/groups_ready", "ready"],
          ["queue/batches_submitted", "submitted"]], "groups, batches", { low: 0 }),
      ],
    },
  ];
  const known = new Set(names);
  return all
    .map(({ title, charts }) => ({
      title,
      charts: charts
        .map((chart) => ({ ...chart, series: chart.series.filter(({ metric }) => known.has(metric)) }))
        .filter((chart) => chart.series.length > 0),
    }))
    .filter(({ charts }) => charts.length > 0);
}

export interface Layer {
  label: string;
  /** A name of the style sheet's colours. */
  colour: string;
  values: Column;
}

function column(metrics: Metrics, name: string): Column {
  return metrics.columns[name] ?? new Array<null>(metrics.steps.length).fill(null);
}

function combine(columns: Column[], of: (...values: number[]) => number): Column {
  return (columns[0] ?? []).map((_, i) => {
    const values = columns.map((each) => each[i] ?? null);
    return values.some((value) => value === null) ? null : of(...(values as number[]));
  });
}

/** From totals since the start to what each step added. */
function perStep(total: Column): Column {
  let before = 0;
  return total.map((value) => {
    if (value === null) return null;
    const added = value - before;
    before = value;
    return added;
  });
}

/** Where the sampled tokens went, the trained ones first; the layers add up to all of them. */
export function ledger(metrics: Metrics, each: boolean): Layer[] {
  if (!metrics.columns["ledger/sampled"]) return [];
  const zero = (values: Column) => values.map((value) => value ?? 0);
  const masked = zero(column(metrics, "ledger/masked_by_loss"));
  const trained = combine([zero(column(metrics, "ledger/trained")), masked], (all, hidden) => all - hidden);
  const dropped = Object.keys(metrics.columns).filter((name) => name.startsWith("ledger/dropped/")).sort();
  const layers: Layer[] = [
    { label: "trained", colour: "--outcome-trained", values: trained },
    { label: "masked by the loss", colour: "--outcome-masked", values: masked },
    ...dropped.map((name, i) => ({
      label: name.slice("ledger/dropped/".length), colour: `--outcome-${(i % 6) + 1}`, values: zero(column(metrics, name)),
    })),
    { label: "pending", colour: "--outcome-pending", values: zero(column(metrics, "ledger/pending")) },
  ];
  const shown = each
    // What waits at a step's end can shrink: it is left out of what the step added.
    ? layers.filter(({ label }) => label !== "pending").map((layer) => ({ ...layer, values: perStep(layer.values) }))
    : layers;
  return shown.filter(({ values }) => values.some((value) => value !== null && value > 0));
}

/** How each side spent the seconds of a step. */
export function sides(metrics: Metrics): { title: string; layers: Layer[] }[] {
  const has = (name: string) => name in metrics.columns;
  if (!has("time/step")) return [];
  const zero = (name: string) => column(metrics, name).map((value) => value ?? 0);
  const step = zero("time/step");
  const rest = (others: Column[]) => combine([step, ...others], (all, ...parts) =>
    Math.max(0, all - parts.reduce((sum, part) => sum + part, 0)));
  const build = (title: string, work: Layer | string, others: [string, string, string][]) => {
    const parts = others.filter(([name]) => has(name)).map(([name, label, colour]) => ({ label, colour, values: zero(name) }));
    const left = rest([...parts.map(({ values }) => values), ...(typeof work === "string" ? [] : [work.values])]);
    const layers = typeof work === "string"
      ? [{ label: work, colour: "--side-work", values: left }, ...parts]
      : [work, ...parts, { label: "other", colour: "--side-other", values: left }];
    return { title, layers: layers.filter(({ values }) => values.some((value) => value !== null && value > 1e-3)) };
  };
  return [
    ...(has("time/sampler_idle") ? [build("Sampler", "generating", [
      ["time/weight_sync", "loading weights", "--side-weights"],
      ["time/sampler_falling_asleep", "handing over", "--side-moving"],
      ["time/sampler_asleep", "asleep", "--side-other"],
      ["time/sampler_idle", "idle", "--side-idle"],
    ])] : []),
    ...(has("time/trainer_idle") && has("seconds") ? [build(
      "Trainer", { label: "training", colour: "--side-work", values: zero("seconds") }, [
        ["time/weight_broadcast", "sending weights", "--side-weights"],
        ["time/trainer_moving", "moving", "--side-moving"],
        ["time/trainer_idle", "idle", "--side-idle"],
      ],
    )] : []),
  ];
}
