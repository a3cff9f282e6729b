/** A group: its trajectories side by side, and the tree of their shared prefixes. */
import { useEffect, useMemo, useRef } from "preact/hooks";
import { opening } from "../conversation";
import { count, figure, plural, signed } from "../format";
import { useAnswer, useKeys, useSeen } from "../hooks";
import { mark } from "../marks";
import { Empty } from "../parts/empty";
import { RowOutcome } from "../parts/outcome";
import { Message } from "../parts/message";
import { Missing, partOf } from "../parts/missing";
import { Tree } from "../parts/tree";
import { go, link, type Route } from "../route";
import type { Source } from "../source";
import type { Group, Row, Run } from "../types";
import { side } from "./trajectories";
import { Text } from "../parts/text";

interface Props {
  source: Source;
  shown: Run;
  /** Changes where a group that was not there may have come. */
  news: string;
  route: Route;
}

export function GroupPage({ source, shown, news, route }: Props) {
  const { run, id } = route;
  const asked = useRef({ key: "", start: 0 });
  const key = `${run}/${id}`;
  if (asked.current.key !== key) asked.current = { key, start: performance.now() };
  const { value, error, fresh } = useAnswer((signal) => source.group(run, id, signal), `${key} ${partOf(shown)}`, news);
  useEffect(() => {
    if (!value || !fresh) return;
    mark("group", asked.current.start, id);
  }, [value, fresh]);
  useKeys({ Escape: () => go(link("trajectories", run)) });
  if (error) return <Missing what="group" why={error} run={shown} />;
  if (!value) return <p class="loading" role="status">Reading the group.</p>;
  return <Shown key={key} source={source} run={run} id={id} group={value} />;
}

function Shown({ source, run, id, group }: { source: Source; run: number; id: string; group: Group }) {
  const rows = group.rows;
  const rewards = rows.flatMap(({ reward }) => (reward === null ? [] : [reward]));
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  const first = rows[0];
  const { value: model } = useAnswer(first ? (signal) => source.trajectory(run, first.key, signal) : null, `${run} ${first?.key}`);
  const start = useMemo(() => (model ? opening(model.messages) : []), [model]);
  const best = rows.reduce((at, row, i) => ((row.reward ?? -Infinity) > (rows[at]?.reward ?? -Infinity) ? i : at), 0);
  if (!first) return <Empty title="No trajectory of this group was kept" why="See trajectory_share in [monitor] of the configuration." />;
  return (
    <div class="group">
      <nav class="crumbs" aria-label="Where">
        <a href={link("trajectories", run)}>Trajectories</a>
        <b>group <Text value={first.group_id ?? id} /></b>
        <a class="aside" href={link("trajectories", run, "", { group: id })}>as a table</a>
      </nav>
      <dl class="facts">
        <div><dt>example</dt><dd class="id"><Text value={first.example_id} title={first.example_id ?? ""} /></dd></div>
        <div><dt>environment</dt><dd><Text value={first.env} /></dd></div>
        <div><dt>step</dt><dd>{count(first.step)}</dd></div>
        <div><dt>trajectories</dt><dd>{count(rows.length)}</dd></div>
        <div><dt>mean reward</dt><dd>{rewards.length ? figure(mean) : "–"}</dd></div>
        <div><dt>standard deviation</dt><dd>{rewards.length ? figure(spread) : "–"}</dd></div>
      </dl>
      <section>
        <h2>Shared prefixes</h2>
        {group.tree && group.tree.nodes.length > 0
          ? <Tree rows={rows} nodes={group.tree.nodes} run={run} />
          : <p class="why">There is no tree: these trajectories have no token ids.</p>}
      </section>
      <section>
        <h2>Side by side</h2>
        {start.length > 0 && (
          <details class="opening"><summary>The opening of {plural(rows.length, "trajectory", "trajectories")}, as the first one has it</summary>
            {start.map((message, i) => <Message key={i} message={message} />)}
          </details>
        )}
        <div class="columns" tabIndex={0} role="region" aria-label="Trajectories side by side">
          {rows.map((row, i) => <Column key={row.key} source={source} run={run} row={row} best={i === best && rewards.length > 1} skip={start.length} />)}
        </div>
      </section>
    </div>
  );
}

function Column({ source, run, row, best, skip }: { source: Source; run: number; row: Row; best: boolean; skip: number }) {
  const [ref, seen] = useSeen("400px");
  const { value, error } = useAnswer(seen ? (signal) => source.trajectory(run, row.key, signal) : null, `${run} ${row.key}`);
  const load = async (path: string) => (await source.text(run, row.key, path)).text;
  return (
    <article class={`column${best ? " best" : ""}`} ref={ref}>
      <header>
        <a href={link("trajectory", run, row.key)}><b>{row.sample_index}</b> <Text value={row.trajectory_id} /></a>
        <p>
          <span>reward <b>{figure(row.reward)}</b></span> <span class={side(row.advantage)}>{signed(row.advantage)}</span> <RowOutcome row={row} />
        </p>
        <p class="of">{plural(row.num_turns, "turn")}, {plural(row.num_sampled_tokens, "token")}, <Text value={row.stop_reason ?? "no end"} />{row.num_breaks ? `, ${plural(row.num_breaks, "break")}` : ""}</p>
      </header>
      {error && <p class="why">{error}</p>}
      {!value && !error && <p class="loading">Reading.</p>}
      {value?.messages.slice(skip).map((message, i) => <Message key={i} message={message} load={load} />)}
      {value && value.messages.length <= skip && <p class="none">Nothing was said after the opening.</p>}
    </article>
  );
}
