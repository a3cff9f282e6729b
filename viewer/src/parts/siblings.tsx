/** The trajectories of the same group, to step between them. */
import { figure } from "../format";
import { useAnswer } from "../hooks";
import { NO_QUERY } from "../query";
import { link } from "../route";
import type { Source } from "../source";
import { spelled } from "../visible";
import type { Trajectory } from "../types";

interface Props {
  source: Source;
  run: number;
  trajectory: Trajectory;
  params: URLSearchParams;
  /** Changes as long as more of the group may come. */
  part: string;
}

export function Siblings({ source, run, trajectory, params, part }: Props) {
  const { group_key: group } = trajectory;
  const { value } = useAnswer(
    group ? (signal) => source.rows(run, { ...NO_QUERY, group, sort: "sample_index" }, 0, 64, signal) : null, `${run} ${group} ${part}`,
  );
  if (!group || !value || value.rows.length < 2) return null;
  const keep = new URLSearchParams(params);
  keep.delete("token");
  return (
    <section class="siblings">
      <h2>Its group <a href={link("group", run, group)}>side by side</a></h2>
      <ol>
        {value.rows.map((row) => (
          <li key={row.key}>
            <a href={link("trajectory", run, row.key, keep)} aria-current={row.key === trajectory.key ? "page" : undefined}
              class={row.reason && row.reason !== "evaluation" ? "dropped" : ""} title={`${spelled(row.trajectory_id)}: reward ${figure(row.reward)}, ${row.reason ?? "trained"}`}>
              {row.reward === null ? "–" : figure(row.reward)}
            </a>
          </li>
        ))}
      </ol>
    </section>
  );
}
