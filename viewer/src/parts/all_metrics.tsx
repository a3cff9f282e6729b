/** Every metric of the run by its name; those that are chosen are drawn. */
import { useState } from "preact/hooks";
import { figure } from "../format";
import { last, type RunData } from "../metrics";
import { setParams, type Route } from "../route";
import { Text } from "./text";
import { SpecChart, type Common } from "../views/overview";

interface Props {
  names: string[];
  runs: RunData[];
  common: Common;
  about: (metric: string | undefined) => string;
  route: Route;
}

export function AllMetrics({ names, runs, common, about, route }: Props) {
  const chosen = (route.params.get("more") ?? "").split(",").filter((name) => names.includes(name));
  const [text, setText] = useState("");
  const [open, setOpen] = useState(chosen.length > 0);
  const toggle = (name: string) => {
    const next = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
    setParams({ more: next.join(",") || null });
  };
  const found = names.filter((name) => name.toLowerCase().includes(text.toLowerCase())).sort();
  return (
    <section class="charts">
      <h2>Every metric</h2>
      {chosen.length > 0 && (
        <div class="cards">
          {chosen.map((metric) => (
            <SpecChart key={metric} spec={{ id: metric, title: metric, unit: "", series: [{ metric, label: metric }] }} runs={runs} about={about} common={common} />
          ))}
        </div>
      )}
      <details class="all-metrics" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>Choose from {names.length} metrics</summary>
        {open && (
          <>
            <input type="search" placeholder="Find a metric" aria-label="Find a metric" value={text} onInput={(event) => setText(event.currentTarget.value)} />
            <ul>
              {found.map((name) => (
                <li key={name}>
                  <label title={about(name)}>
                    <input type="checkbox" checked={chosen.includes(name)} onChange={() => toggle(name)} />
                    <code><Text value={name} /></code>
                    <output>{figure(last(runs[0]?.metrics?.columns[name]))}</output>
                  </label>
                </li>
              ))}
            </ul>
          </>
        )}
      </details>
    </section>
  );
}
