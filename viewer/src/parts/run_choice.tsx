/** Which of several runs a view is about. */
import { spelled } from "../visible";
import type { Run } from "../types";
import { go, link, type View } from "../route";

export function RunChoice({ runs, run, view }: { runs: Run[]; run: number; view: View }) {
  if (runs.length < 2) return null;
  return (
    <label class="field">
      <span>run</span>
      <select value={String(run)} onChange={(event) => go(link(view, Number(event.currentTarget.value)))}>
        {runs.map(({ id, name }) => <option key={id} value={String(id)}>{spelled(name)}</option>)}
      </select>
    </label>
  );
}
