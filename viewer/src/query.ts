/** Filters and order of the table of trajectories: to and from a link, to the server, and applied to rows. */
import type { Facets, Row, RowsAnswer } from "./types";

export interface Query {
  sort: string;
  kind: string;
  env: string;
  step: string;
  reward: string;
  stop_reason: string;
  reason: string;
  flag: string;
  breaks: string;
  errors: string;
  group: string;
  text: string;
}

export const NO_QUERY: Query = {
  sort: "", kind: "", env: "", step: "", reward: "", stop_reason: "", reason: "", flag: "", breaks: "", errors: "", group: "",
  text: "",
};

const NAMES = Object.keys(NO_QUERY) as (keyof Query)[];

export function queryFrom(params: URLSearchParams): Query {
  return Object.fromEntries(NAMES.map((name) => [name, params.get(name) ?? ""])) as unknown as Query;
}

/** The parameters that say something, in a fixed order. */
export function toParams(query: Query): URLSearchParams {
  const params = new URLSearchParams();
  for (const name of NAMES) if (query[name] !== "") params.set(name, query[name]);
  return params;
}

export function isFiltered(query: Query): boolean {
  return NAMES.some((name) => name !== "sort" && name !== "kind" && query[name] !== "");
}

/** Stands for a missing value in filters and their choices. */
export const MISSING = "(none)";

/** The parameters as the server reads them. */
export function toServer(query: Query): URLSearchParams {
  const params = toParams(query);
  for (const name of ["step", "reward"] as const) {
    if (query[name] === "") continue;
    const [low, high] = range(query[name]);
    params.set(name, high === Infinity ? `${low}-` : `${low === -Infinity ? "-1e300" : low}-${high}`);
  }
  return params;
}

/** Reads `lo..hi`; an empty side is open. */
export function range(text: string): [number, number] {
  const [low = "", high = ""] = text.split("..");
  return [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
}

function matches(row: Row, query: Query, text: (row: Row) => string): boolean {
  for (const name of ["kind", "env", "stop_reason", "reason"] as const) {
    if (query[name] && (row[name] ?? MISSING) !== query[name]) return false;
  }
  if (query.flag && !(row.flags.length ? row.flags : [MISSING]).includes(query.flag)) return false;
  if (query.group && row.group_key !== query.group && row.group_id !== query.group) return false;
  if (query.breaks && !row.num_breaks) return false;
  if (query.errors && !row.error) return false;
  if (query.step) {
    const [low, high] = range(query.step);
    if (row.step < low || row.step > high) return false;
  }
  if (query.reward) {
    const [low, high] = range(query.reward);
    if (row.reward === null || row.reward < low || row.reward > high) return false;
  }
  return !query.text || text(row).toLowerCase().includes(query.text.toLowerCase());
}

type Key = number | string | null;

function keyOf(row: Row, column: string): Key {
  const value = (row as unknown as Record<string, unknown>)[column];
  if (typeof value === "boolean") return Number(value);
  if (typeof value === "number" || typeof value === "string") return value;
  return Array.isArray(value) ? value.join(" ") || null : null;
}

function compare(a: Key, b: Key): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0;
}

/** What the server does, on rows in memory: for exported pages. */
export function select(rows: Row[], query: Query, offset: number, limit: number, text: (row: Row) => string): RowsAnswer {
  const found = rows.filter((row) => matches(row, query, text));
  const sort = query.sort || "-step";
  const [column, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
  found.sort((a, b) => {
    const [x, y] = [keyOf(a, column), keyOf(b, column)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * compare(x, y) || compare(a.group_id, b.group_id) || a.sample_index - b.sample_index;
  });
  return { total: rows.length, matched: found.length, rows: found.slice(offset, offset + limit), pending: false };
}

export function facetsOf(rows: Row[]): Facets {
  const count = (values: (string | null)[]) => {
    const counts: Record<string, number> = {};
    for (const value of values) counts[value ?? MISSING] = (counts[value ?? MISSING] ?? 0) + 1;
    return counts;
  };
  const span = (values: (number | null)[]): [number, number] | null => {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return low <= high ? [low, high] : null;
  };
  return {
    kind: count(rows.map((row) => row.kind)),
    env: count(rows.map((row) => row.env)),
    stop_reason: count(rows.map((row) => row.stop_reason)),
    reason: count(rows.map((row) => row.reason)),
    flag: count(rows.flatMap((row) => (row.flags.length ? row.flags : [null]))),
    step: span(rows.map((row) => row.step)),
    reward: span(rows.map((row) => row.reward)),
  };
}
