/** The runs with the figures that one looks at first. */
import { count, figure, percent, plural } from "../format";
import { intervalOf, last, playedOf, raised, type Metrics, type RunData } from "../metrics";
import { link } from "../route";
import { categorical } from "../views/overview";
import { Text } from "./text";

const STATES = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", unknown: "" } as const;

interface Props {
  runs: RunData[];
  hidden: number[];
  toggle: (id: number) => void;
}

export function RunTable({ runs, hidden, toggle }: Props) {
  const several = runs.length > 1;
  return (
    <div class="runs-box"><table class="runs">
      <thead>
        <tr>
          <th>run</th><th>step</th><th>reward</th><th>success</th><th>evaluation</th><th>mismatch KL</th>
          <th title="share of all sampled tokens that were trained">tokens trained</th>
          <th title="share of the last 8 steps">sampler idle</th><th title="share of the last 8 steps">trainer idle</th>
          <th>trajectories</th><th>alarms</th>
        </tr>
      </thead>
      <tbody>
        {runs.map(({ run, metrics }) => (
          <tr key={run.id} class={hidden.includes(run.id) ? "off" : ""}>
            <th scope="row">
              {several && (
                <input type="checkbox" aria-label={`show ${run.name}`} checked={!hidden.includes(run.id)} onChange={() => toggle(run.id)} />
              )}
              {several && <i class="swatch" style={{ color: `var(${categorical(run.id)})` }} />}
              <Text title={run.folder} value={run.name} />
              <span class={`state ${run.state}`}>{STATES[run.state] ?? run.state}</span>
            </th>
            <td>
              {count(run.step)}{run.max_steps ? <span class="of"> of {count(run.max_steps)}</span> : null}
              {run.max_steps ? <progress max={run.max_steps} value={run.step} aria-label="progress" /> : null}
            </td>
            <td>{shown(metrics, "reward/mean")}</td>
            <td>{shown(metrics, "success")}</td>
            <td><LastEvaluation metrics={metrics} /></td>
            <td>{shown(metrics, "mismatch_kl")}</td>
            <td>{ratio(metrics, "ledger/trained", "ledger/sampled")}</td>
            <td>{shareOfTime(metrics, "time/sampler_idle")}</td>
            <td>{shareOfTime(metrics, "time/trainer_idle")}</td>
            <td>
              <a href={link("trajectories", run.id)}>{count(run.num_trajectories)}</a>
              {run.indexed < 1 && <span class="of" title="the index is being built"> {percent(run.indexed)} read</span>}
            </td>
            <td>{alarmsOf(metrics)}</td>
          </tr>
        ))}
      </tbody>
    </table></div>
  );
}

function shown(metrics: Metrics | null, name: string) {
  return figure(last(metrics?.columns[name]));
}

function ratio(metrics: Metrics | null, part: string, whole: string) {
  const [a, b] = [last(metrics?.columns[part]), last(metrics?.columns[whole])];
  return a === null || !b ? "–" : percent(Math.min(1, a / b));
}

/** Of the last 8 steps together: in the very last one a side may have nothing left to do. */
function shareOfTime(metrics: Metrics | null, part: string) {
  const steps = (metrics?.columns["time/step"] ?? []).slice(-8);
  const idle = (metrics?.columns[part] ?? []).slice(-8);
  const known = steps.map((whole, i) => [whole ?? 0, Math.min(idle[i] ?? 0, whole ?? 0)] as const).filter(([whole], i) => whole > 0 && idle[i] != null);
  const whole = known.reduce((sum, [each]) => sum + each, 0);
  return whole ? percent(known.reduce((sum, [, each]) => sum + each, 0) / whole) : "–";
}

function LastEvaluation({ metrics }: { metrics: Metrics | null }) {
  const newest = metrics?.evals.reduce((best, each) => (each.step >= best ? each.step : best), -1) ?? -1;
  const found = metrics?.evals.filter(({ step }) => step === newest) ?? [];
  if (found.length === 0) return <>–</>;
  return (
    <>
      {found.slice(0, 3).map((each) => {
        const interval = intervalOf(each, "success");
        return (
          <span key={each.env} class="evaluation" title={`${each.env}, step ${each.step}: ${playedOf(each)}`}>
            {figure(round(each.metrics.success))}
            {interval && <span class="of"> [{interval[0].toFixed(3)}, {interval[1].toFixed(3)}]</span>}
          </span>
        );
      })}
    </>
  );
}

function round(value: number | null | undefined): number | null {
  return typeof value === "number" ? Math.round(value * 1000) / 1000 : null;
}

function alarmsOf(metrics: Metrics | null) {
  const now = raised(metrics?.alarms ?? []).length;
  const all = metrics?.alarms.filter(({ state }) => state === "raised").length ?? 0;
  if (now) return <a class="alarmed" href="#alarms" onClick={jump}>{plural(now, "alarm")}</a>;
  return all ? `none, ${count(all)} before` : "none";
}

function jump(event: Event) {
  event.preventDefault(); // the fragment names the view
  document.getElementById("alarms")?.scrollIntoView({ block: "nearest" });
}
