/** Where the page's data come from: the server of `verbatim view`, or the blocks of an exported page. */
import { NO_QUERY, facetsOf, select, toServer, type Query } from "./query";
import type {
  Cut, Facets, Group, MetricsAnswer, PartAnswer, Row, RowsAnswer, Run, Trajectory,
} from "./types";
import { textOf } from "./types";

export interface Source {
  /** Whether the data can still change. */
  live: boolean;
  /** How many trajectories there were when this was exported; null = this is no exported file. */
  ofTotal: number | null;
  /** How many of them an exported file holds. */
  held: number;
  runs(): Promise<Run[]>;
  metrics(run: number, after: number | null): Promise<MetricsAnswer>;
  config(run: number): Promise<{ toml: string }>;
  summary(run: number): Promise<{ text: string | null }>;
  rows(run: number, query: Query, offset: number, limit: number, signal?: AbortSignal): Promise<RowsAnswer>;
  facets(run: number): Promise<Facets>;
  trajectory(run: number, id: string, signal?: AbortSignal): Promise<Trajectory>;
  /** Tokens of a long turn, from this offset of its own tokens on. */
  part(run: number, id: string, turn: number, offset: number): Promise<PartAnswer>;
  text(run: number, id: string, path: string): Promise<{ text: string }>;
  /** The record as one JSON text, to copy or keep. */
  raw(run: number, id: string): Promise<string>;
  group(run: number, id: string, signal?: AbortSignal): Promise<Group>;
}

/** An error whose message is one sentence for the reader. */
export class Refused extends Error {}

class Server implements Source {
  live = true;
  ofTotal = null;
  held = 0;

  private async ask(path: string, signal?: AbortSignal): Promise<Response> {
    let response: Response;
    try {
      response = await fetch(`api/${path}`, { signal: signal ?? null, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Refused("The server does not answer: verbatim view was ended, or this machine was suspended.");
    }
    if (response.ok) return response;
    const body: unknown = await response.json().catch(() => null);
    const said = body && typeof body === "object" && "error" in body ? String(body.error) : "";
    throw new Refused(said || `The server answered ${response.status} to api/${path}.`);
  }

  private async json<T>(path: string, signal?: AbortSignal): Promise<T> {
    return (await (await this.ask(path, signal)).json()) as T;
  }

  runs = () => this.json<Run[]>("runs");
  metrics = (run: number, after: number | null) =>
    this.json<MetricsAnswer>(`runs/${run}/metrics${after === null ? "" : `?after=${after}`}`);
  config = (run: number) => this.json<{ toml: string }>(`runs/${run}/config`);
  summary = (run: number) => this.json<{ text: string | null }>(`runs/${run}/summary`);
  facets = (run: number) => this.json<Facets>(`runs/${run}/facets`);
  rows(run: number, query: Query, offset: number, limit: number, signal?: AbortSignal) {
    const params = toServer(query);
    params.set("offset", String(offset));
    params.set("limit", String(limit));
    return this.json<RowsAnswer>(`runs/${run}/trajectories?${params}`, signal).then(withRows);
  }
  private of = (run: number, id: string) => `runs/${run}/trajectories/${encodeURIComponent(id)}`;
  trajectory = (run: number, id: string, signal?: AbortSignal) => this.json<Trajectory>(this.of(run, id), signal).then(whole);
  part = (run: number, id: string, turn: number, offset: number) =>
    this.json<PartAnswer>(`${this.of(run, id)}?turn=${turn}&offset=${offset}`);
  text = (run: number, id: string, path: string) =>
    this.json<{ text: string }>(`${this.of(run, id)}/text?path=${encodeURIComponent(path)}`);
  raw = async (run: number, id: string) => (await this.ask(`${this.of(run, id)}/raw`)).text();
  group = (run: number, id: string, signal?: AbortSignal) =>
    this.json<Group>(`runs/${run}/groups/${encodeURIComponent(id)}`, signal).then(withRows);
}

/** Reads `<script type="application/json" data-url="/api/runs" data-encoding="gzip-base64">`: an answer of the server each. */
class Exported implements Source {
  live = false;
  ofTotal: number | null = null;
  held = 0;
  private allRows = new Map<number, Promise<Row[]>>();
  private searched = new Map<string, Promise<string>>();
  private blocks = new Map<string, Element>();

  constructor(about: string) {
    const { of_total: total } = JSON.parse(about) as { of_total?: number };
    this.ofTotal = total ?? null;
    for (const block of document.querySelectorAll("script[data-url]")) {
      const url = block.getAttribute("data-url") ?? "";
      this.blocks.set(url, block);
      if (url.includes("/trajectories/")) this.held += 1;
    }
  }

  private async json<T>(path: string): Promise<T> {
    const block = this.blocks.get(`/api/${path}`);
    if (!block) throw new Refused("This is not in the exported file. Open the run with verbatim view to see it.");
    const coded = atob((block.textContent ?? "").trim());
    const bytes = new Uint8Array(coded.length);
    for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return (await new Response(stream).json()) as T;
  }

  runs = () => this.json<Run[]>("runs");
  metrics = (run: number) => this.json<MetricsAnswer>(`runs/${run}/metrics`);
  config = (run: number) => this.json<{ toml: string }>(`runs/${run}/config`);
  summary = (run: number) => this.json<{ text: string | null }>(`runs/${run}/summary`);

  private readRows(run: number): Promise<Row[]> {
    const known = this.allRows.get(run);
    if (known) return known;
    const rows = this.json<RowsAnswer>(`runs/${run}/trajectories`).then((answer) => withRows(answer).rows);
    this.allRows.set(run, rows);
    return rows;
  }

  /** Of the rows that are in the file, which need not be all of the run's. */
  facets = async (run: number): Promise<Facets> => facetsOf(await this.readRows(run));

  async rows(run: number, query: Query, offset: number, limit: number): Promise<RowsAnswer> {
    const rows = await this.readRows(run);
    if (!query.text) return select(rows, query, offset, limit, () => "");
    // The other filters first: only what they leave is unpacked and searched.
    const left = select(rows, { ...query, text: "" }, 0, rows.length, () => "").rows;
    const texts = new Map<Row, string>();
    await Promise.all(left.map(async (row) => texts.set(row, await this.searchable(run, row))));
    const found = select(left, { ...NO_QUERY, sort: query.sort, text: query.text }, offset, limit, (row) => texts.get(row) ?? "");
    return { ...found, total: rows.length };
  }

  /** Figures and messages of a trajectory as one text. */
  private searchable(run: number, row: Row): Promise<string> {
    const path = `runs/${run}/trajectories/${row.key}`;
    const known = this.searched.get(path);
    if (known) return known;
    const figures = [row.trajectory_id, row.example_id, row.group_id, textOf(row.error ?? "")].join("\n");
    const text = !this.blocks.has(`/api/${path}`) ? Promise.resolve(figures) : this.json<Trajectory>(path).then(
      (found) => `${figures}\n${strings(found.messages).join("\n")}`,
    );
    this.searched.set(path, text);
    return text;
  }

  /** A key as it is; of another id the key that the rows have. */
  private async keyOf(run: number, id: string, name: "key" | "group_key", other: "trajectory_id" | "group_id"): Promise<string> {
    if (id.startsWith("~")) return id;
    return (await this.readRows(run)).find((row) => row[other] === id)?.[name] ?? id;
  }

  trajectory = async (run: number, id: string) =>
    whole(await this.json<Trajectory>(`runs/${run}/trajectories/${await this.keyOf(run, id, "key", "trajectory_id")}`));
  part = async (): Promise<PartAnswer> => {
    throw new Refused("The rest of this turn is not in the exported file. Open the run with verbatim view to see it.");
  };
  text = async (): Promise<{ text: string }> => {
    throw new Refused("The rest of this text is not in the exported file. Open the run with verbatim view to see it.");
  };
  raw = async (run: number, id: string) => JSON.stringify(await this.trajectory(run, id), null, 2);
  group = async (run: number, id: string) =>
    withRows(await this.json<Group>(`runs/${run}/groups/${await this.keyOf(run, id, "group_key", "group_id")}`));
}

/** Numbers that JSON lacks come as texts. */
function number(value: unknown): number | null {
  return typeof value === "number" ? value : typeof value === "string" ? Number(value) : null;
}

function withRows<T extends { rows: Row[] }>(answer: T): T {
  for (const row of answer.rows) normal(row);
  return answer;
}

function normal(row: Row): void {
  row.reward = number(row.reward);
  row.advantage = number(row.advantage);
}

/** A trajectory as the page reads it: numbers as numbers, and each cut text with what is known of the rest. */
function whole(found: Trajectory): Trajectory {
  normal(found);
  for (const turn of found.turns) {
    turn.reward = number(turn.reward);
    turn.advantage = number(turn.advantage);
  }
  for (const parts of [found.reward_parts, found.agent_rewards]) {
    for (const [name, value] of Object.entries(parts ?? {})) parts[name] = number(value);
  }
  const { cut = [] } = found as Trajectory & { cut?: { path: string; length: number }[] };
  for (const { path, length } of cut) {
    const names = path.split("/").map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
    let inner = found as unknown as Record<string, unknown>;
    for (const name of names.slice(0, -1)) inner = (inner?.[name] ?? {}) as Record<string, unknown>;
    const last = names.at(-1) ?? "";
    if (typeof inner[last] === "string") inner[last] = { cut: inner[last], length, path } satisfies Cut;
  }
  return found;
}

/** Every text inside a JSON value. */
function strings(value: unknown): string[] {
  if (typeof value === "string") return [value];
  if (Array.isArray(value)) return value.flatMap(strings);
  return value && typeof value === "object" ? Object.values(value).flatMap(strings) : [];
}

export function openSource(): Source {
  const exported = document.getElementById("verbatim-export");
  return exported ? new Exported(exported.textContent ?? "{}") : new Server();
}
