/** Alarms with what they saw, what most often causes it, and what to change. */
import { figure } from "../format";
import { raised, type RunData } from "../metrics";
import { link } from "../route";
import type { Alarm } from "../types";
import { Text } from "./text";

/** Raised alarms that are shown whole. */
const OPEN = 3;

export function AlarmList({ runs }: { runs: RunData[] }) {
  const several = runs.length > 1;
  const all = runs.flatMap(({ run, metrics }) => (metrics?.alarms ?? []).map((alarm) => ({ run, alarm })));
  if (all.length === 0) return null;
  const now = new Set(runs.flatMap(({ metrics }) => raised(metrics?.alarms ?? [])));
  // What was raised first is nearest to the cause: others often follow from it.
  const active = all.filter(({ alarm }) => now.has(alarm));
  const past = all.filter(({ alarm }) => !now.has(alarm)).reverse();
  return (
    <section class="alarms" id="alarms" aria-label="Alarms">
      {active.map(({ run, alarm }, i) => <AlarmCard key={keyOf(run.id, alarm)} alarm={alarm} run={run.id} name={several ? run.name : null} open={i < OPEN} />)}
      {past.length > 0 && (
        <details class="past">
          <summary>{active.length ? "Earlier alarms" : "No alarm is raised now. Earlier alarms"} ({past.length})</summary>
          {past.map(({ run, alarm }) => <AlarmCard key={keyOf(run.id, alarm)} alarm={alarm} run={run.id} name={several ? run.name : null} />)}
        </details>
      )}
    </section>
  );
}

function keyOf(run: number, alarm: Alarm): string {
  return `${run} ${alarm.step} ${alarm.name} ${alarm.env} ${alarm.state}`;
}

function AlarmCard({ alarm, run, name, open = false }: { alarm: Alarm; run: number; name: string | null; open?: boolean }) {
  const evidence = Object.entries(alarm.evidence ?? {});
  return (
    <details class={`alarm ${alarm.state}`} open={open}>
      <summary>
        <span class="kind">{alarm.state === "cleared" ? "cleared: " : ""}<Text value={alarm.name.replaceAll("_", " ")} /></span>
        <span class="when">step {alarm.step}{alarm.env ? <>, <Text value={alarm.env} /></> : ""}{name ? <>, <Text value={name} /></> : ""}</span>
        <span class="told"><Text value={alarm.message} /></span>
      </summary>
      <dl>
        {alarm.cause && <><dt>Cause</dt><dd><Text value={alarm.cause} /></dd></>}
        {alarm.advice && <><dt>Do</dt><dd><Text value={alarm.advice} /></dd></>}
        {evidence.length > 0 && (
          <><dt>Seen</dt><dd>{evidence.map(([metric, value]) => <span key={metric} class="fact"><code>{metric}</code> {figure(value)}</span>)}</dd></>
        )}
        {(alarm.trajectory_ids?.length > 0 || alarm.env) && (
          <><dt>Look at</dt><dd>
            {(alarm.trajectory_ids ?? []).slice(0, 12).map((id) => <a key={id} class="fact" href={link("trajectory", run, id)}><Text value={id} /></a>)}
            {alarm.env && <a class="fact" href={link("trajectories", run, "", { kind: "train", env: alarm.env })}>all of <Text value={alarm.env} /></a>}
          </dd></>
        )}
      </dl>
    </details>
  );
}
