/** The link's fragment names the view: `#/trajectories/0?env=a`, `#/trajectory/0/ID?color=logprob`. */
import { useEffect, useState } from "preact/hooks";

export type View = "overview" | "trajectories" | "trajectory" | "group";
const VIEWS: readonly string[] = ["overview", "trajectories", "trajectory", "group"];

export interface Route {
  view: View;
  run: number;
  /** Of the trajectory or the group. */
  id: string;
  params: URLSearchParams;
}

export function readRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view = "", run = "", ...rest] = path.split("/");
  let id = rest.join("/");
  try {
    id = decodeURIComponent(id);
  } catch {
    // A link that was cut short: the id is looked up as it stands.
  }
  const found = VIEWS.includes(view) ? (view as View) : "overview";
  return { view: found, run: /^\d+$/.test(run) ? Number(run) : 0, id, params: new URLSearchParams(query) };
}

export function link(view: View, run: number, id = "", params?: URLSearchParams | Record<string, string>): string {
  const query = new URLSearchParams(params).toString();
  return `#/${view}/${run}${id ? `/${encodeURIComponent(id)}` : ""}${query ? `?${query}` : ""}`;
}

/** Go to a link. `replace` leaves no entry in the history: for what changes while one types. */
export function go(to: string, replace = false): void {
  if (to === location.hash) return;
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = to;
  }
}

export function useRoute(): Route {
  const [route, set] = useState(() => readRoute(location.hash));
  useEffect(() => {
    const changed = () => set(readRoute(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/** Change some parameters of the present view. */
export function setParams(changes: Record<string, string | null>, replace = true): void {
  const { view, run, id, params } = readRoute(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") params.delete(name);
    else params.set(name, value);
  }
  go(link(view, run, id, params), replace);
}
