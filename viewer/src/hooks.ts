/** What several views need: one answer at a time, live runs, keys, the theme. */
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Virtualizer, elementScroll, observeElementOffset, observeElementRect } from "@tanstack/virtual-core";
import type { VirtualizerOptions } from "@tanstack/virtual-core";

export interface Answer<T> {
  value: T | null;
  error: string | null;
}

/** The answer to the newest question; older ones are given up. The last value stays until the next one is there.
 *
 * A question that was answered with an error is asked again whenever `news` changes: what was not there may have come. */
export function useAnswer<T>(
  ask: ((signal: AbortSignal) => Promise<T>) | null, key: string, news = "",
): Answer<T> & { fresh: boolean } {
  const [answer, set] = useState<Answer<T> & { key: string }>({ value: null, error: null, key: "" });
  const heard = useRef(news);
  if (answer.error !== null && answer.key === key) heard.current = news;
  useEffect(() => {
    if (!ask) return;
    const control = new AbortController();
    ask(control.signal).then(
      (value) => !control.signal.aborted && set({ value, error: null, key }),
      (error: unknown) => !control.signal.aborted && set({ value: null, error: sentence(error), key }),
    );
    return () => control.abort();
  }, [key, ask === null, heard.current]);
  return { ...answer, fresh: answer.key === key };
}

export function sentence(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Calls at once and then every `period` milliseconds, ten times slower while the page is not seen. */
export function useEvery(period: number, on: boolean, call: () => Promise<void>): void {
  const latest = useRef(call);
  latest.current = call;
  useEffect(() => {
    let timer = 0;
    let ended = false;
    const turn = async () => {
      await latest.current();
      if (!ended && on) timer = window.setTimeout(turn, document.hidden ? 10 * period : period);
    };
    void turn();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [period, on]);
}

export function isTyping(event: KeyboardEvent): boolean {
  const target = event.target;
  return target instanceof HTMLElement && (target.matches("input, textarea, select") || target.isContentEditable);
}

/** Keys of a view, by `event.key`; none while one types or holds Ctrl, Alt or Meta. */
export function useKeys(keys: Record<string, (event: KeyboardEvent) => void>): void {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const act = latest.current[event.key];
      if (!act || (isTyping(event) && event.key !== "Escape")) return;
      act(event);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** A virtual list in the way of TanStack's own adapters: rendered again when it says so. */
export function useVirtual(
  options: Pick<VirtualizerOptions<HTMLElement, HTMLElement>, "count" | "estimateSize" | "getScrollElement"> &
    Partial<VirtualizerOptions<HTMLElement, HTMLElement>>,
): Virtualizer<HTMLElement, HTMLElement> {
  const [, again] = useState(0);
  const full: VirtualizerOptions<HTMLElement, HTMLElement> = {
    observeElementRect,
    observeElementOffset,
    scrollToFn: elementScroll,
    ...options,
    onChange: (instance, sync) => {
      again((n) => n + 1);
      options.onChange?.(instance, sync);
    },
  };
  const virtualizer = useMemo(() => new Virtualizer<HTMLElement, HTMLElement>(full), []);
  virtualizer.setOptions(full);
  useEffect(() => virtualizer._didMount(), []);
  useEffect(() => virtualizer._willUpdate());
  return virtualizer;
}

/** Whether the element has come near the screen; it stays true. */
export function useSeen(margin = "600px"): [(node: HTMLElement | null) => void, boolean] {
  const [seen, set] = useState(false);
  const observer = useRef<IntersectionObserver | null>(null);
  const ref = useCallback((node: HTMLElement | null) => {
    observer.current?.disconnect();
    if (!node) return;
    observer.current = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        set(true);
        observer.current?.disconnect();
      },
      { rootMargin: margin },
    );
    observer.current.observe(node);
  }, []);
  return [ref, seen];
}
