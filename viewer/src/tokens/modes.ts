/** What the colour of a token says: a class of the style sheet for each token, and the legend. */
import { figure, signed } from "../format";
import { OUTCOME_MEANS, outcomeColour } from "../parts/outcome";
import type { Trajectory } from "../types";
import type { Token, TurnTokens } from "./tokens";

export const MODES = ["outcome", "logprob", "trainer", "advantage", "version", "teacher", "gradient"] as const;
export type ModeName = (typeof MODES)[number];

export interface LegendItem {
  /** The class that its tokens have. */
  colour: string;
  label: string;
  about?: string;
}

export interface Mode {
  name: ModeName;
  label: string;
  /** Why nothing is coloured; null where something is. */
  missing: string | null;
  legend: LegendItem[];
  of: (token: Token, turn: TurnTokens) => string;
}

export const LABELS: Record<ModeName, string> = {
  outcome: "outcome", logprob: "logprob", trainer: "trainer − sampler", advantage: "advantage", version: "policy version",
  teacher: "teacher − sampler", gradient: "gradient",
};

/** Probabilities at which the colour of a logprob changes. */
const PROBABILITIES = [0.99, 0.9, 0.5, 0.2, 0.05, 0.01, 0.001];
const CONTEXT: LegendItem = { colour: "ctx", label: "context", about: "in the prompt; not sampled in this turn" };
const MISSING: LegendItem = { colour: "miss", label: "no value" };

/** The next of 1, 2 and 5 times a power of ten. */
export function nice(value: number): number {
  if (!(value > 0) || !Number.isFinite(value)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-4)) ?? 10) * power;
}

/** The class of a value from -limit to limit: n4 to n1, zero, p1 to p4. */
export function diverging(value: number, limit: number): string {
  const size = Math.min(4, Math.ceil((Math.abs(value) / limit) * 4 - 1e-3));
  return size === 0 || Math.abs(value) < limit / 1000 ? "zero" : `${value > 0 ? "p" : "n"}${size}`;
}

function divergingLegend(limit: number): LegendItem[] {
  return [
    { colour: "n4", label: `≤ ${signed(-limit)}` }, { colour: "n2", label: signed(-limit / 2) }, { colour: "zero", label: "0" },
    { colour: "p2", label: signed(limit / 2) }, { colour: "p4", label: `≥ ${signed(limit)}` },
  ];
}

export interface Scales {
  outcomes: string[];
  masked: boolean;
  versions: number[];
  trainer: number | null;
  teacher: number | null;
  advantage: number | null;
  gradient: number | null;
  logprobs: boolean;
}

/** The 99th percentile of the sizes, as a nice number; null without a value. */
function limit(sizes: number[]): number | null {
  if (sizes.length === 0) return null;
  sizes.sort((a, b) => a - b);
  return nice(sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 0);
}

export function scales(trajectory: Trajectory, turns: TurnTokens[]): Scales {
  const outcomes = new Set<string>();
  const versions = new Set<number>();
  const [trainer, teacher, gradient, advantage]: number[][] = [[], [], [], []];
  let [logprobs, masked] = [false, false];
  for (const tokens of turns) {
    outcomes.add(tokens.turn.outcome);
    const own = advantageOf(trajectory, tokens);
    if (own !== null) advantage?.push(Math.abs(own));
    for (const part of tokens.sampled()) {
      part.completion_ids.forEach((_, i) => {
        const [mu, pi, other, slope, version] = [part.logprobs?.[i], part.trainer_logprobs?.[i], part.teacher_logprobs?.[i],
          part.gradients?.[i], part.policy_versions?.[i]];
        if (typeof mu === "number") logprobs = true;
        if (typeof mu === "number" && typeof pi === "number") trainer?.push(Math.abs(pi - mu));
        if (typeof mu === "number" && typeof other === "number") teacher?.push(Math.abs(other - mu));
        if (typeof slope === "number") gradient?.push(Math.abs(slope));
        if (slope === 0 && tokens.turn.outcome === "trained") masked = true;
        if (typeof version === "number") versions.add(version);
      });
    }
  }
  return {
    outcomes: [...outcomes].sort((a, b) => outcomeColour(a) - outcomeColour(b)), masked, versions: [...versions].sort((a, b) => a - b),
    trainer: limit(trainer ?? []), teacher: limit(teacher ?? []), advantage: limit(advantage ?? []),
    gradient: limit(gradient ?? []), logprobs,
  };
}

export function advantageOf(trajectory: Trajectory, tokens: TurnTokens): number | null {
  return tokens.turn.advantage ?? trajectory.advantage;
}

export function outcomeOfToken(token: Token, tokens: TurnTokens): string {
  if (!token.sampled) return "context";
  return tokens.turn.outcome === "trained" && token.gradient === 0 ? "masked" : tokens.turn.outcome;
}

export function mode(name: ModeName, trajectory: Trajectory, found: Scales): Mode {
  const base = { name, label: LABELS[name], missing: null as string | null };
  const sampled = (of: (token: Token, turn: TurnTokens) => string) =>
    (token: Token, turn: TurnTokens) => (token.sampled ? of(token, turn) : "ctx");
  const difference = (size: number | null, other: (token: Token) => number | null, missing: string): Mode => ({
    ...base, missing: size === null ? missing : null, legend: size === null ? [CONTEXT] : [...divergingLegend(size), MISSING, CONTEXT],
    of: sampled((token) => {
      const value = other(token);
      return value === null || size === null ? "miss" : diverging(value, size);
    }),
  });
  const minus = (a: number | null, b: number | null) => (a === null || b === null ? null : a - b);
  switch (name) {
    case "outcome":
      return {
        ...base,
        legend: [
          ...found.outcomes.map((outcome) => ({ colour: `f${outcomeColour(outcome)}`, label: outcome, about: OUTCOME_MEANS[outcome] ?? "dropped by this filter" })),
          ...(found.masked ? [{ colour: "fm", label: "trained, no gradient", about: "its gradient is 0: masked by the loss, or an advantage of 0" }] : []),
          CONTEXT,
        ],
        of: sampled((token, turn) => {
          const outcome = outcomeOfToken(token, turn);
          return outcome === "masked" ? "fm" : `f${outcomeColour(outcome)}`;
        }),
      };
    case "logprob":
      return {
        ...base, missing: found.logprobs ? null : "The sampler gave no logprobs.",
        legend: [
          ...PROBABILITIES.map((p, i) => ({ colour: `s${i}`, label: `> ${100 * p}%` })),
          { colour: "s7", label: "less" }, MISSING, CONTEXT,
        ],
        of: sampled(({ logprob }) => {
          if (logprob === null) return "miss";
          const at = PROBABILITIES.findIndex((p) => Math.exp(logprob) > p);
          return `s${at < 0 ? 7 : at}`;
        }),
      };
    case "trainer":
      return difference(found.trainer, ({ trainer, logprob }) => minus(trainer, logprob),
        "There are no trainer logprobs: they exist where a turn was trained.");
    case "teacher":
      return difference(found.teacher, ({ teacher, logprob }) => minus(teacher, logprob), "No teacher scored this run.");
    case "gradient":
      return difference(found.gradient, ({ gradient }) => gradient, "There are no gradients: they exist where a turn was trained.");
    case "advantage": {
      const size = found.advantage;
      return {
        ...base, missing: size === null ? "It has no advantage." : null,
        legend: size === null ? [CONTEXT] : [...divergingLegend(size), CONTEXT],
        of: sampled((_, turn) => {
          const value = advantageOf(trajectory, turn);
          return value === null || size === null ? "miss" : diverging(value, size);
        }),
      };
    }
    case "version": {
      const { versions } = found;
      const shade = (version: number) => {
        const at = versions.indexOf(version);
        return `s${versions.length < 2 ? 2 : Math.round((at / (versions.length - 1)) * 6) + 1}`;
      };
      const shown = versions.length <= 8 ? versions : versions.filter((_, i) => i % Math.ceil(versions.length / 7) === 0 || i === versions.length - 1);
      return {
        ...base, missing: versions.length ? null : "The sampler gave no policy versions.",
        legend: [...shown.map((version) => ({ colour: shade(version), label: figure(version) })), MISSING, CONTEXT],
        of: sampled(({ version }) => (version === null ? "miss" : shade(version))),
      };
    }
  }
}
