/** The table of all trajectories: filtered, sorted and searched by the server, drawn as far as one sees it. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, figure, plural, signed } from "../format";
import { useAnswer, useKeys, useVirtual } from "../hooks";
import { mark } from "../marks";
import { Empty } from "../parts/empty";
import { RowOutcome } from "../parts/outcome";
import { Filters } from "../parts/filters";
import { RunChoice } from "../parts/run_choice";
import { useRows } from "../rows";
import { isFiltered, queryFrom, toParams, NO_QUERY, type Query } from "../query";
import { go, link, type Route } from "../route";
import type { Source } from "../source";
import { textOf, type Facets, type Row, type Run } from "../types";
import { Text } from "../parts/text";

const HEIGHT = 30;

interface Column {
  name: keyof Row;
  /** What a click on the title sorts by, where it is another column. */
  sort?: keyof Row;
  /** Sorted from A to Z at first, and not from the largest. */
  text?: boolean;
  title: string;
  about?: string;
  number?: boolean;
  cell: (row: Row) => preact.ComponentChildren;
}

const COLUMNS: Column[] = [
  { name: "step", title: "step", number: true, about: "the step it was trained in, dropped before, or evaluated after", cell: (row) => <>{row.kind === "eval" && row.reason !== "evaluation" && <span class="tag" title="of an evaluation">eval</span>}{count(row.step)}</> },
  { name: "env", text: true, title: "environment", cell: (row) => <Text value={row.env} /> },
  { name: "trajectory_id", text: true, title: "trajectory", cell: (row) => <Text value={row.trajectory_id} /> },
  { name: "example_id", text: true, title: "example", cell: (row) => <Text value={row.example_id} /> },
  { name: "reward", title: "reward", number: true, cell: (row) => <Reward value={row.reward} /> },
  { name: "advantage", title: "advantage", number: true, cell: (row) => <span class={side(row.advantage)}>{signed(row.advantage)}</span> },
  { name: "reason", text: true, title: "outcome", about: "trained, or why not", cell: (row) => <RowOutcome row={row} /> },
  { name: "stop_reason", text: true, title: "ended by", cell: (row) => <><Text value={row.stop_reason ?? "–"} />{row.truncated && <span class="tag warn" title="something was cut off">cut</span>}</> },
  { name: "num_turns", title: "turns", number: true, cell: (row) => count(row.num_turns) },
  { name: "num_sampled_tokens", title: "tokens", number: true, about: "sampled tokens", cell: (row) => count(row.num_sampled_tokens) },
  { name: "num_breaks", title: "breaks", number: true, about: "turns of agents that had spoken before, whose prompt extends no sample", cell: (row) => (row.num_breaks ? <span class="tag warn">{row.num_breaks}</span> : <span class="none">0</span>) },
  { name: "flags", sort: "error", text: true, title: "flags and error", about: "filters that flagged it, and its error", cell: (row) => <Notes row={row} /> },
];

function Notes({ row }: { row: Row }) {
  const error = row.error && textOf(row.error);
  return (
    <>
      {row.flags.map((flag) => <span key={flag} class="tag"><Text value={flag} /></span>)}
      {error && <span class="tag error"><Text title={error.slice(0, 500)} value={error.slice(0, 120)} /></span>}
    </>
  );
}

export function side(value: number | null): string {
  return value === null || value === 0 ? "even" : value > 0 ? "up" : "down";
}

export function Reward({ value }: { value: number | null }) {
  return value === null ? <span class="none" title="never scored">–</span> : <>{figure(value)}</>;
}

interface Props {
  source: Source;
  runs: Run[];
  route: Route;
}

export function Trajectories({ source, runs, route }: Props) {
  const run = runs.find(({ id }) => id === route.run) ?? runs[0];
  const query = useMemo(() => queryFrom(route.params), [route.params.toString()]);
  const { value: facets } = useAnswer<Facets>(() => source.facets(route.run), `${route.run} ${run?.generation} ${run?.version}`);
  const kind = query.kind || (facets && !facets.kind.train && facets.kind.eval ? "eval" : "train");
  const asking = useMemo(() => ({ ...query, kind: kind === "all" ? "" : kind }), [query, kind]);
  const key = `${route.run}?${toParams(asking)}`;
  const rows = useRows(source, run?.id ?? 0, asking, key, run?.version ?? 0);
  const box = useRef<HTMLDivElement>(null);
  const search = useRef<HTMLInputElement>(null);
  const [active, setShown] = useState(() => places.get(key)?.active ?? 0);
  // Keys come faster than drawings: they count on from here.
  const now = useRef(active);
  const setActive = (index: number) => {
    now.current = index;
    places.set(key, { top: box.current?.scrollTop ?? 0, active: index });
    setShown(index);
  };
  const list = useVirtual({
    count: rows.matched, getScrollElement: () => box.current, estimateSize: () => HEIGHT, overscan: 12,
    initialOffset: places.get(key)?.top ?? 0,
  });
  const items = list.getVirtualItems();
  const [first, end] = [items[0]?.index ?? 0, (items.at(-1)?.index ?? 0) + 1];
  useEffect(() => rows.want(first, end), [first, end, key, rows.matched]);

  // Another question begins at the top; the same one after a look at a trajectory where it was.
  const shownKey = useRef(key);
  useEffect(() => {
    if (shownKey.current === key) return;
    shownKey.current = key;
    setActive(0);
    box.current?.scrollTo({ top: 0 });
  }, [key]);

  const asked = useRef({ key: "", start: 0 });
  if (asked.current.key !== key) asked.current = { key, start: performance.now() };
  useEffect(() => {
    if (!rows.fresh) return;
    mark("table", asked.current.start, key);
  }, [rows.fresh, key]);

  const change = (changes: Partial<Query>, replace = false) =>
    go(link("trajectories", route.run, "", toParams({ ...query, ...changes })), replace);
  const cleared = { ...NO_QUERY, sort: query.sort, kind: query.kind };
  const move = (to: number) => {
    const next = Math.max(0, Math.min(rows.matched - 1, to));
    setActive(next);
    list.scrollToIndex(next, { align: "auto" });
  };
  const open = (row: Row | undefined) => row && go(link("trajectory", route.run, row.key, toParams(query)));
  const page = Math.max(1, Math.floor((box.current?.clientHeight ?? 600) / HEIGHT) - 2);
  const onKeyDown = (event: KeyboardEvent) => {
    const at = now.current;
    const moves: Record<string, number> = {
      ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: rows.matched - 1, j: at + 1, k: at - 1,
    };
    const to = moves[event.key];
    if (to !== undefined) move(to);
    else if (event.key === "Enter") open(rows.at(at));
    else if (event.key === "g") {
      const row = rows.at(at);
      if (row) go(link("group", route.run, row.group_key));
    } else return;
    event.preventDefault();
  };
  useKeys({
    "/": (event) => { event.preventDefault(); search.current?.focus(); search.current?.select(); },
    Escape: (event) => {
      if (event.target === search.current) { search.current?.blur(); box.current?.focus(); }
      else if (isFiltered(query)) change(cleared);
    },
    ArrowDown: (event) => { if (event.target === document.body) { box.current?.focus(); onKeyDown(event); } },
    ArrowUp: (event) => { if (event.target === document.body) { box.current?.focus(); onKeyDown(event); } },
  });

  const sort = query.sort || "-step";
  const onSort = (name: string, text: boolean) => {
    const [first, second] = text ? [name, `-${name}`] : [`-${name}`, name];
    change({ sort: sort === first ? second : first });
  };
  return (
    <div class="trajectories">
      <div class="filters-row">
        <RunChoice runs={runs} run={route.run} view="trajectories" />
        <Filters facets={facets} query={query} change={change} search={search} />
      </div>
      <div class="found">
        {facets?.kind.eval && facets.kind.train ? <Kinds kind={kind} counts={facets.kind} set={(next) => change({ kind: next === "train" ? "" : next })} /> : null}
        <span role="status">{rows.error ? "" : rows.ready ? `${count(rows.matched)} of ${plural(rows.total, "trajectory", "trajectories")}` : "Reading."}
        </span>
        {rows.pending && <span class="pending"> · messages are still being searched</span>}
        {run && run.indexed < 1 && <span class="pending"> · the index has read {Math.floor(run.indexed * 100)}% of the run</span>}
        {rows.news && <button type="button" onClick={rows.refresh}>There are new ones · show</button>}
        {isFiltered(query) && <button type="button" onClick={() => change(cleared)}>Remove all filters</button>}
      </div>
      {rows.error && <Empty title="The trajectories could not be read" why={rows.error} />}
      {!rows.error && rows.ready && rows.matched === 0 && (
        isFiltered(query) && rows.total > 0
          ? <Empty title={rows.pending ? "Nothing found so far" : "No trajectory fits these filters"} why={rows.pending ? "Messages are still being searched." : "Remove one of them, or press Escape to remove all."} />
          : <Empty title="No trajectories" why={rows.why ?? (run?.state === "running"
            ? "They appear when the first step is finished." : "This run kept none: see save_trajectories and trajectory_share in [monitor] of its configuration.")} />
      )}
      <div
        class="table" role="grid" ref={box} tabIndex={0} onKeyDown={onKeyDown} hidden={rows.ready && rows.matched === 0}
        aria-rowcount={rows.matched + 1} aria-label="Trajectories" aria-activedescendant={`row-${active}`}
        onScroll={(event) => places.set(key, { top: event.currentTarget.scrollTop, active: now.current })}
      >
        <div class="row head" role="row" aria-rowindex={1}>
          {COLUMNS.map(({ name, sort: by = name, text = false, title, about, number }) => {
            const order = sort === by ? "ascending" : sort === `-${by}` ? "descending" : "none";
            return (
              <div key={name} role="columnheader" aria-sort={order} class={`cell ${name}${number ? " number" : ""}`}>
                <button type="button" tabIndex={-1} title={about} onClick={() => onSort(by, text)}>
                  {title}{order === "ascending" ? " ↑" : order === "descending" ? " ↓" : ""}
                </button>
              </div>
            );
          })}
        </div>
        <div class="tall" style={{ height: `${list.getTotalSize()}px` }}>
          {items.map(({ index, start }) => {
            const row = rows.at(index);
            return (
              <div
                key={index} id={`row-${index}`} role="row" data-testid="row" data-key={row?.key} aria-rowindex={index + 2} aria-selected={index === active}
                class={`row${index === active ? " active" : ""}${row ? "" : " waiting"}`} style={{ transform: `translateY(${start}px)` }}
                onClick={() => { setActive(index); open(row); }}
              >
                {row && COLUMNS.map(({ name, number, cell }) => (
                  <div key={name} role="gridcell" class={`cell ${name}${number ? " number" : ""}`}>
                    {name === "trajectory_id"
                      ? <a tabIndex={-1} href={link("trajectory", route.run, row.key, toParams(query))} onClick={(event) => event.stopPropagation()}>{cell(row)}</a>
                      : cell(row)}
                  </div>
                ))}
              </div>
            );
          })}
        </div>
      </div>
      <p class="keys">↑ ↓ choose · Enter opens · g its group · / search · Esc removes filters</p>
    </div>
  );
}

function Kinds({ kind, counts, set }: { kind: string; counts: Record<string, number>; set: (kind: string) => void }) {
  const choices = [["train", `training (${count(counts.train ?? 0)})`], ["eval", `evaluation (${count(counts.eval ?? 0)})`], ["all", "both"]] as const;
  return (
    <span class="segments" role="radiogroup" aria-label="Of training or evaluation">
      {choices.map(([name, label]) => <button key={name} type="button" role="radio" aria-checked={kind === name} onClick={() => set(name)}>{label}</button>)}
    </span>
  );
}

/** Where each question's table was left, for the way back. */
const places = new Map<string, { top: number; active: number }>();
