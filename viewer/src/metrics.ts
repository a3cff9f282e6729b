/** The metrics of the shown runs: asked for step by step while a run goes on, and kept as columns. */
import { useRef, useState } from "preact/hooks";
import { plural } from "./format";
import { sentence, useEvery } from "./hooks";
import type { Source } from "./source";
import type { Alarm, Evaluation, Interval, MetricName, MetricsAnswer, Run } from "./types";

export type Column = (number | null)[];

export interface Metrics {
  steps: number[];
  columns: Record<string, Column>;
  evals: Evaluation[];
  alarms: Alarm[];
  names: Record<string, MetricName>;
  why: string | null;
  evalsWhy: string | null;
}

export interface RunData {
  run: Run;
  metrics: Metrics | null;
  error: string | null;
}

function fromAnswer(answer: MetricsAnswer): Metrics {
  return {
    steps: answer.steps, columns: answer.columns, evals: answer.evals, alarms: answer.alarms, names: named(answer.names),
    why: answer.why ?? null, evalsWhy: answer.evals_why ?? null,
  };
}

function named(names: MetricsAnswer["names"]): Record<string, MetricName> {
  const all = Object.entries(names ?? {}).map(([name, said]) => [name, Array.isArray(said) ? { unit: said[0], about: said[1] } : said] as const);
  return Object.fromEntries(all);
}

const keyOfEvaluation = (e: Evaluation) => `${e.step}\0${e.env}`;
const keyOfAlarm = (a: Alarm) => `${a.step}\0${a.name}\0${a.env ?? ""}\0${a.state}`;

function merged<T>(old: T[], more: T[], key: (each: T) => string): T[] {
  const found = new Map(old.map((each) => [key(each), each]));
  for (const each of more) found.set(key(each), each);
  return [...found.values()];
}

/** The metrics with the steps of `more` behind; a metric that is new has no values before. */
export function append(old: Metrics, more: MetricsAnswer): Metrics {
  const last = old.steps.at(-1) ?? -Infinity;
  const start = more.steps.findIndex((step) => step > last);
  const steps = start < 0 ? [] : more.steps.slice(start);
  const columns: Record<string, Column> = {};
  for (const name of new Set([...Object.keys(old.columns), ...Object.keys(more.columns)])) {
    const before = old.columns[name] ?? new Array<null>(old.steps.length).fill(null);
    const after = more.columns[name]?.slice(Math.max(0, start)) ?? new Array<null>(steps.length).fill(null);
    columns[name] = steps.length ? before.concat(after) : before;
  }
  return {
    steps: old.steps.concat(steps), columns, names: { ...old.names, ...named(more.names) },
    evals: merged(old.evals, more.evals, keyOfEvaluation), alarms: merged(old.alarms, more.alarms, keyOfAlarm),
    why: more.why ?? null, evalsWhy: more.evals_why ?? null,
  };
}

interface Known {
  metrics: Metrics | null;
  error: string | null;
  seen: string;
  generation: number;
}

/** Runs and their metrics, asked for again every two seconds while one of them can change. */
export function useRuns(source: Source): { runs: RunData[] | null; error: string | null } {
  const [state, set] = useState<{ runs: RunData[] | null; error: string | null }>({ runs: null, error: null });
  const known = useRef(new Map<number, Known>());
  const times = useRef(0);

  async function readMetrics(run: Run): Promise<boolean> {
    const old = known.current.get(run.id);
    // An evaluation can end after its step was counted: look for it now and then.
    const due = run.state === "running" ? Math.floor(times.current / 5) : 0;
    const seen = `${run.generation} ${run.state} ${run.step} ${run.num_alarms} ${due}`;
    if (old && old.seen === seen) return false;
    try {
      const last = old?.metrics?.steps.at(-1);
      const goesOn = old?.metrics && last !== undefined && old.generation === run.generation;
      const answer = await source.metrics(run.id, goesOn ? last : null);
      const metrics = goesOn && old.metrics ? append(old.metrics, answer) : fromAnswer(answer);
      known.current.set(run.id, { metrics, error: null, seen, generation: run.generation });
    } catch (error) {
      known.current.set(run.id, { metrics: old?.metrics ?? null, error: sentence(error), seen: "", generation: old?.generation ?? -1 });
    }
    return true;
  }

  useEvery(2000, source.live, async () => {
    try {
      const runs = await source.runs();
      times.current += 1;
      await Promise.all(runs.map(readMetrics));
      set({
        runs: runs.map((run) => {
          const { metrics = null, error = null } = known.current.get(run.id) ?? {};
          return { run, metrics, error };
        }),
        error: null,
      });
    } catch (error) {
      set((old) => ({ runs: old.runs, error: sentence(error) }));
    }
  });
  return state;
}

export function last(column: Column | undefined): number | null {
  if (!column) return null;
  for (let i = column.length - 1; i >= 0; i--) {
    const value = column[i];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

/** The alarms that are raised at the end: each name and environment by what was said of it last. */
export function raised(alarms: Alarm[]): Alarm[] {
  const newest = new Map<string, Alarm>();
  for (const alarm of alarms) newest.set(`${alarm.name}\0${alarm.env ?? ""}`, alarm);
  return [...newest.values()].filter((alarm) => alarm.state === "raised");
}

/** The 95% interval that the run logged; null where it logged none. */
export function intervalOf(evaluation: Evaluation, name: string): Interval | null {
  return evaluation.metrics.intervals?.[name] ?? null;
}

/** How much was played. */
export function playedOf({ metrics: { examples, episodes } }: Evaluation): string {
  return [[examples, "example"], [episodes, "episode"]].flatMap(([n, what]) => (typeof n === "number" ? [plural(n, String(what))] : [])).join(", ");
}

/** Whether the mean reward of an evaluation says nothing beside its success; failed episodes have no reward. */
export function rewardIsSuccess({ metrics: { "reward/mean": reward, success, episodes, failed } }: Evaluation): boolean {
  if (typeof reward !== "number" || typeof success !== "number") return true;
  return Math.abs(reward * (1 - (failed ?? 0) / Math.max(1, episodes ?? 1)) - success) <= 1e-6;
}
