/** The fields above the table of trajectories. */
import type { RefObject } from "preact";
import { useEffect, useState } from "preact/hooks";
import { count, figure } from "../format";
import { spelled } from "../visible";
import { MISSING, range, type Query } from "../query";
import type { Facets } from "../types";
import { Text } from "./text";

interface Props {
  facets: Facets | null;
  query: Query;
  change: (changes: Partial<Query>, replace?: boolean) => void;
  search: RefObject<HTMLInputElement | null>;
}

export function Filters({ facets, query, change, search }: Props) {
  return (
    <div class="filters" role="search" aria-label="Filters">
      <SearchField value={query.text} change={(text) => change({ text }, true)} input={search} />
      <Choice label="environment" value={query.env} counts={facets?.env} any="all" set={(env) => change({ env })} />
      <Range label="step" value={query.step} limits={facets?.step ?? null} set={(step) => change({ step })} />
      <Range label="reward" value={query.reward} limits={facets?.reward ?? null} set={(reward) => change({ reward })} />
      <Choice label="ended by" value={query.stop_reason} counts={facets?.stop_reason} any="anything" names={{ [MISSING]: "nothing" }} set={(stop_reason) => change({ stop_reason })} />
      <Choice label="outcome" value={query.reason} counts={facets?.reason} any="any" names={{ [MISSING]: "not dropped as a whole" }} set={(reason) => change({ reason })} />
      <Choice label="flagged by" value={query.flag} counts={facets?.flag} any="any or none" names={{ [MISSING]: "no filter" }} set={(flag) => change({ flag })} />
      <div class="field check" role="group" aria-label="only with">
        <span>only with</span>
        <span class="box">
          <Check label="breaks" on={query.breaks !== ""} set={(on) => change({ breaks: on ? "1" : "" })} />
          <Check label="errors" on={query.errors !== ""} set={(on) => change({ errors: on ? "1" : "" })} />
        </span>
      </div>
      {query.group && <button type="button" class="chip" onClick={() => change({ group: "" })}>group <Text value={query.group} /> ✕</button>}
    </div>
  );
}

function SearchField({ value, change, input }: { value: string; change: (text: string) => void; input: RefObject<HTMLInputElement | null> }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return;
    const timer = setTimeout(() => change(text), 150);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <label class="field search">
      <span>search</span>
      <input ref={input} data-testid="filter-text" type="search" value={text} placeholder="ids, errors, messages" spellcheck={false} dir="auto"
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Enter" && change(text)} />
    </label>
  );
}

interface ChoiceProps {
  label: string;
  value: string;
  counts: Record<string, number> | undefined;
  any: string;
  /** What stands for a value. */
  names?: Record<string, string>;
  set: (value: string) => void;
}

function Choice({ label, value, counts, any, names: shown = {}, set }: ChoiceProps) {
  const names = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
  if (value && !names.some(([name]) => name === value)) names.push([value, 0]);
  if (names.length === 0 || (names.length === 1 && label === "environment" && !value)) return null;
  return (
    <label class="field">
      <span>{label}</span>
      <select value={value} data-testid={`filter-${label === "environment" ? "env" : label}`} class={value ? "set" : ""} onChange={(event) => set(event.currentTarget.value)}>
        <option value="">{any}</option>
        {names.map(([name, amount]) => <option key={name} value={name}>{`${shown[name] ?? spelled(name)} (${count(amount)})`}</option>)}
      </select>
    </label>
  );
}

function Range({ label, value, limits, set }: { label: string; value: string; limits: [number | null, number | null] | null; set: (value: string) => void }) {
  const [low = "", high = ""] = value.split("..");
  const change = (from: string, to: string) => {
    const [a, b] = range(`${from}..${to}`);
    if (!Number.isNaN(a) && !Number.isNaN(b)) set(from === "" && to === "" ? "" : `${from}..${to}`);
  };
  const hint = (at: 0 | 1) => (typeof limits?.[at] === "number" ? figure(limits[at]) : "");
  return (
    <div class="field range" role="group" aria-label={label}>
      <span>{label}</span>
      <span class="ends">
      <input type="number" step="any" value={low} placeholder={hint(0)} aria-label={`${label} from`} class={low ? "set" : ""} onChange={(event) => change(event.currentTarget.value, high)} />
      <span aria-hidden="true">–</span>
      <input type="number" step="any" value={high} placeholder={hint(1)} aria-label={`${label} to`} class={high ? "set" : ""} onChange={(event) => change(low, event.currentTarget.value)} />
      </span>
    </div>
  );
}

function Check({ label, on, set }: { label: string; on: boolean; set: (on: boolean) => void }) {
  return (
    <label><input type="checkbox" checked={on} data-testid={`filter-${label}`} onChange={(event) => set(event.currentTarget.checked)} /> {label}</label>
  );
}
