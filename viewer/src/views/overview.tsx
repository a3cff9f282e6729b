/** The curves of one run, or of several laid over each other. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart, type ChartProps, type Line } from "../charts/chart";
import { stack } from "../charts/layers";
import { ledger, sections, sides, type Spec } from "../charts/specs";
import { mark } from "../marks";
import { intervalOf, playedOf, rewardIsSuccess, type RunData } from "../metrics";
import { AlarmList } from "../parts/alarms";
import { Empty } from "../parts/empty";
import { RunTable } from "../parts/run_table";
import { AllMetrics } from "../parts/all_metrics";
import { setParams, type Route } from "../route";
import type { Source } from "../source";
import type { Run } from "../types";
import { plural } from "../format";
import { Text } from "../parts/text";

const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 3], [8, 3, 2, 3]];
const SMOOTH: [string, string][] = [["", "as measured"], ["0.6", "smoothed"], ["0.9", "strongly smoothed"]];

/** The colour of a run among several, or of a curve among those of one run. */
export function categorical(i: number): string {
  return `--c${(i % 8) + 1}`;
}

export function linesOf(spec: Spec, runs: RunData[]): Line[] {
  const several = runs.length > 1;
  return runs.flatMap(({ run, metrics }) => spec.series.flatMap(({ metric, label }, i) => {
    const ys = metrics?.columns[metric];
    if (!metrics || !ys) return [];
    return [{
      label: several ? (spec.series.length > 1 ? `${run.name} · ${label}` : run.name) : label,
      colour: categorical(several ? run.id : i), dash: several ? DASHES[i % DASHES.length] : undefined,
      xs: metrics.steps, ys: spec.zero ? ys.map((value) => value ?? 0) : ys,
    }];
  }));
}

function evaluationLines(runs: RunData[], metric: "success" | "reward/mean"): Line[] {
  const several = runs.length > 1;
  return runs.flatMap(({ run, metrics }) => {
    const envs = [...new Set(metrics?.evals.map(({ env }) => env))];
    return envs.map((env, i) => {
      const found = (metrics?.evals ?? []).filter((each) => each.env === env).sort((a, b) => a.step - b.step);
      const intervals = found.map((each) => intervalOf(each, metric));
      return {
        label: several ? (envs.length > 1 ? `${run.name} · ${env}` : run.name) : env,
        colour: categorical(several ? run.id : i), dash: several ? DASHES[i % DASHES.length] : undefined, points: true,
        xs: found.map(({ step }) => step), ys: found.map((each) => each.metrics[metric] ?? null), note: found.map(playedOf),
        low: intervals.map((each) => each?.[0] ?? null), high: intervals.map((each) => each?.[1] ?? null),
      };
    });
  });
}

interface Props {
  source: Source;
  runs: RunData[];
  route: Route;
}

export function Overview({ source, runs, route }: Props) {
  const hidden = (route.params.get("hide") ?? "").split(",").filter(Boolean).map(Number);
  const shown = runs.filter(({ run }) => !hidden.includes(run.id));
  const zoom = useMemo(() => {
    const [low, high] = (route.params.get("x") ?? "").split("..").map(Number);
    return low !== undefined && high !== undefined && low < high ? [low, high] as [number, number] : null;
  }, [route.params.get("x")]);
  const smooth = Number(route.params.get("smooth") ?? 0);
  const names = useMemo(
    () => [...new Set(shown.flatMap(({ metrics }) => Object.keys(metrics?.columns ?? {})))],
    [shown.map(({ metrics }) => metrics)],
  );
  const alarms = useMemo(() => shown.flatMap(({ metrics }) => metrics?.alarms ?? []), [shown]);
  const about = (metric: string | undefined) => {
    const name = shown.map(({ metrics }) => metrics?.names[metric ?? ""]).find(Boolean);
    return name ? `${metric}: ${name.about}` : (metric ?? "");
  };
  const common = {
    alarms, zoom, smooth,
    onZoom: (range: [number, number] | null) => setParams({ x: range ? range.join("..") : null }),
  };
  const hasSteps = shown.some(({ metrics }) => metrics && (metrics.steps.length > 0 || metrics.evals.length > 0));
  useEffect(() => {
    if (hasSteps) mark("overview", 0);
  }, [hasSteps]);
  const toggle = (id: number) => {
    const next = hidden.includes(id) ? hidden.filter((each) => each !== id) : [...hidden, id];
    setParams({ hide: next.join(",") || null });
  };

  return (
    <div class="overview">
      <RunTable runs={runs} hidden={hidden} toggle={toggle} />
      {shown.map(({ run }) => <Problems key={run.id} run={run} name={runs.length > 1} />)}
      {runs.map(({ run, error }) => error && <Empty key={run.id} title={`The metrics of ${run.name} could not be read`} why={error} />)}
      <AlarmList runs={shown} />
      {!hasSteps && <NoSteps runs={shown} />}
      {hasSteps && (
        <div class="toolbar" role="toolbar" aria-label="Curves">
          <label>
            Curves{" "}
            <select value={route.params.get("smooth") ?? ""} onChange={(event) => setParams({ smooth: event.currentTarget.value })}>
              {SMOOTH.map(([value, label]) => <option key={value} value={value}>{label}</option>)}
            </select>
          </label>
          {zoom
            ? <button type="button" onClick={() => setParams({ x: null })}>Steps {zoom[0]} to {zoom[1]} · show all</button>
            : <span class="hint">Drag across a curve to look at some steps; double-click for all.</span>}
        </div>
      )}
      {hasSteps && sections(names).map(({ title, charts }, position) => (
        <section key={title} class="charts">
          <h2>{title}</h2>
          <div class="cards">
            {charts.map((spec) => <SpecChart key={spec.id} spec={spec} runs={shown} about={about} common={common} />)}
            {position === 0 && <EvaluationCard runs={shown} common={common} />}
            {position === 0 && shown.map((data) => <Ledger key={data.run.id} data={data} common={common} several={shown.length > 1} />)}
            {title === "Time and staleness" && shown.map((data) => <Sides key={data.run.id} data={data} common={common} several={shown.length > 1} />)}
          </div>
        </section>
      ))}
      {hasSteps && <AllMetrics names={names} runs={shown} common={common} about={about} route={route} />}
      {shown.length === 1 && shown[0] && <Documents key={shown[0].run.id} source={source} run={shown[0].run.id} />}
    </div>
  );
}

export type Common = Pick<ChartProps, "alarms" | "zoom" | "smooth" | "onZoom">;

export function SpecChart({ spec, runs, about, common }: { spec: Spec; runs: RunData[]; about: (metric: string | undefined) => string; common: Common }) {
  const lines = useMemo(() => linesOf(spec, runs), [spec.series.map(({ metric }) => metric).join(), ...watch(runs)]);
  const metrics = spec.series.map(({ metric }) => metric);
  const told = metrics.map(about).join("\n");
  return <Chart {...common} title={spec.title} unit={spec.unit} about={told} lines={lines} low={spec.low} high={spec.high} metrics={metrics} />;
}

/** What changes when the metrics of these runs do; always as many values. */
function watch(runs: RunData[]): unknown[] {
  const key = runs.map(({ run, metrics }) => `${run.id}:${metrics?.steps.length}:${metrics?.evals.length}:${metrics?.steps[0]}`).join();
  return [key];
}

function EvaluationCard({ runs, common }: { runs: RunData[]; common: Common }) {
  const lines = useMemo(() => evaluationLines(runs, "success"), watch(runs));
  const rewards = useMemo(
    () => (runs.every(({ metrics }) => metrics?.evals.every(rewardIsSuccess) ?? true) ? [] : evaluationLines(runs, "reward/mean")),
    watch(runs),
  );
  if (lines.length === 0) {
    const why = runs.map(({ metrics }) => metrics?.evalsWhy).find(Boolean);
    return (
      <section class="card chart">
        <header><h3>Evaluation</h3></header>
        <p class="why">{why || "None so far. A table [orchestrator.eval] in the configuration asks for evaluations."}</p>
      </section>
    );
  }
  return (
    <>
      <Chart {...common} smooth={0} title="Evaluation" unit="success, 95% interval" about="success of each evaluation with its 95% interval"
        lines={lines} low={0} high={1} metrics={["eval/success"]} />
      {rewards.length > 0 && (
        <Chart {...common} smooth={0} title="Evaluated reward" unit="mean, 95% interval" about="mean reward of each evaluation with its 95% interval"
          lines={rewards} metrics={["eval/reward/mean"]} />
      )}
    </>
  );
}

function Ledger({ data, common, several }: { data: RunData; common: Common; several: boolean }) {
  const [each, setEach] = useState(false);
  const { metrics, run } = data;
  const lines = useMemo(
    () => (metrics ? stack(metrics.steps, ledger(metrics, each), true, "tokens") : []),
    [each, ...watch([data])],
  );
  if (lines.length === 0) return null;
  return (
    <Chart {...common} wide stacked title={`Sampled tokens${several ? ` · ${run.name}` : ""}`} unit="share" height={several ? 96 : 148}
      about="ledger/*: every sampled token is trained, pending, or dropped for one reason" lines={lines} low={0} high={1}
      metrics={Object.keys(metrics?.columns ?? {}).filter((name) => name.startsWith("ledger/"))}
      beside={
        <div class="switch" role="group" aria-label="Tokens">
          <button type="button" aria-pressed={!each} onClick={() => setEach(false)}>since the start</button>
          <button type="button" aria-pressed={each} onClick={() => setEach(true)}>of each step</button>
        </div>
      } />
  );
}

function Sides({ data, common, several }: { data: RunData; common: Common; several: boolean }) {
  const { metrics, run } = data;
  const bands = useMemo(
    () => (metrics ? sides(metrics).map(({ title, layers }) => ({ title, lines: stack(metrics.steps, layers, true, "seconds") })) : []),
    watch([data]),
  );
  return (
    <>
      {bands.map(({ title, lines }) => (
        <Chart key={title} {...common} wide stacked height={92} title={`${title}'s time${several ? ` · ${run.name}` : ""}`} unit="share of a step"
          about="time/*: how this side spent each step" lines={lines} low={0} high={1}
          metrics={title === "Sampler" ? ["time/sampler_idle", "time/weight_sync"] : ["time/trainer_idle", "seconds"]} />
      ))}
    </>
  );
}

/** What of the run's folder could not be read. */
function Problems({ run, name }: { run: Run; name: boolean }) {
  const found = [...(run.problems ?? []), ...(run.tokenizer_problem ? [run.tokenizer_problem] : [])];
  if (found.length === 0) return null;
  return (
    <details class="problems">
      <summary>{name ? `${run.name}: ` : ""}{plural(found.length, "remark")} on the run folder</summary>
      <ul>{found.map((problem) => <li key={problem}><Text value={problem} /></li>)}</ul>
    </details>
  );
}

function NoSteps({ runs }: { runs: RunData[] }) {
  const loading = runs.some(({ metrics, error }) => !metrics && !error);
  if (loading) return <p class="loading" role="status">Reading the metrics.</p>;
  const why = runs.map(({ metrics }) => metrics?.why).find(Boolean);
  const states = new Set(runs.map(({ run }) => run.state));
  return (
    <Empty title={runs.length ? "No step is finished yet" : "Every run is hidden"} why={
      why ?? (runs.length === 0 ? "Switch one on in the list above."
        : states.has("running") ? "The first curves appear with the first finished step. Loading the model and a warm start come before it."
          : "The run ended before its first step; its log files say why.")
    } />
  );
}

function Documents({ source, run }: { source: Source; run: number }) {
  const [config, setConfig] = useState<string | null>(null);
  const [summary, setSummary] = useState<string | null>(null);
  const opened = (set: (text: string) => void, ask: () => Promise<string>) => (event: Event) => {
    if ((event.currentTarget as HTMLDetailsElement).open) ask().then(set, (error: unknown) => set(String(error)));
  };
  return (
    <section class="documents">
      <details onToggle={opened(setConfig, async () => (await source.config(run)).toml)}>
        <summary>Configuration</summary>
        <pre>{config ?? "Reading."}</pre>
      </details>
      <details onToggle={opened(setSummary, async () => (await source.summary(run)).text ?? "There is no summary: it is written when the run ends.")}>
        <summary>Summary</summary>
        <pre>{summary ?? "Reading."}</pre>
      </details>
    </section>
  );
}
