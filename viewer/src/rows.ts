/** The rows of one question, in pages of which only those that are seen are asked for. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { sentence } from "./hooks";
import type { Query } from "./query";
import type { Source } from "./source";
import type { Row } from "./types";

export const PAGE = 100;

interface State {
  key: string;
  total: number;
  matched: number;
  pending: boolean;
  why: string | null;
  error: string | null;
}

export interface Rows extends State {
  /** Whether any answer has come. */
  ready: boolean;
  /** Whether it is the answer to the present question. */
  fresh: boolean;
  /** Whether rows have come since: they are not shown before one asks, so that nothing moves under the reader. */
  news: boolean;
  at: (index: number) => Row | undefined;
  want: (first: number, end: number) => void;
  refresh: () => void;
}

const NOTHING: State = { key: "", total: 0, matched: 0, pending: false, why: null, error: null };

/** The list that was shown last: the view of a trajectory steps through it. */
export const shownList: { run: number; key: string; ids: Map<number, string>; matched: number } =
  { run: -1, key: "", ids: new Map(), matched: 0 };

export function useRows(source: Source, run: number, query: Query, key: string, version: number): Rows {
  const [state, set] = useState<State>(NOTHING);
  const [round, setRound] = useState(0);
  const pages = useRef(new Map<number, Row[]>());
  const asked = useRef(new Set<number>());
  const control = useRef(new AbortController());
  const seen = useRef(version);
  const own = `${key}#${round}`;
  const now = useRef(own);
  now.current = own;

  async function ask(page: number): Promise<void> {
    if (asked.current.has(page)) return;
    asked.current.add(page);
    const { signal } = control.current;
    if (pages.current.size === 0) seen.current = version;
    try {
      const answer = await source.rows(run, query, page * PAGE, PAGE, signal);
      if (signal.aborted || now.current !== own) return;
      pages.current.set(page, answer.rows);
      answer.rows.forEach((row, i) => shownList.ids.set(page * PAGE + i, row.key));
      shownList.matched = answer.matched;
      set({ key: own, total: answer.total, matched: answer.matched, pending: answer.pending, why: answer.why ?? null, error: null });
    } catch (error) {
      if (signal.aborted) return;
      asked.current.delete(page);
      set((old) => ({ ...old, key: own, error: sentence(error) }));
    }
  }

  useEffect(() => {
    control.current = new AbortController();
    // The old rows stay until the first answer is there, so that typing does not flicker.
    const old = pages.current;
    asked.current = new Set();
    Object.assign(shownList, { run, key, ids: new Map(), matched: 0 });
    pages.current = new Map();
    kept.current = old;
    void ask(0);
    const { current } = control;
    return () => current.abort();
  }, [own, run]);
  const kept = useRef(new Map<number, Row[]>());

  // A search through messages goes on: look again until it is done.
  useEffect(() => {
    if (!state.pending || state.key !== own) return;
    const timer = setTimeout(() => {
      const shown = [...pages.current.keys()];
      asked.current = new Set();
      for (const page of shown) void ask(page);
    }, 400);
    return () => clearTimeout(timer);
  }, [state]);

  const fresh = state.key === own;
  // A list that is still short fills itself.
  const news = version !== seen.current;
  useEffect(() => {
    if (news && fresh && state.matched < PAGE / 4) setRound((n) => n + 1);
  }, [news, fresh, state.matched]);

  const want = useMemo(() => {
    let timer = 0;
    return (first: number, end: number) => {
      clearTimeout(timer);
      const missing: number[] = [];
      for (let page = Math.floor(first / PAGE); page * PAGE < end; page++) if (!pages.current.has(page)) missing.push(page);
      if (missing.length === 0) return;
      timer = window.setTimeout(() => missing.forEach((page) => void ask(page)), 40);
    };
  }, [own, run]);

  return {
    ...state, fresh, ready: state.key !== "", news, want,
    at: (index) => (fresh ? pages : kept).current.get(Math.floor(index / PAGE))?.[index % PAGE],
    refresh: () => setRound((n) => n + 1),
  };
}
