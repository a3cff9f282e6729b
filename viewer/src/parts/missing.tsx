/** Says of something that a link names why it cannot be shown, or that the run is still being read and it may come. */
import type { Run } from "../types";
import { Empty } from "./empty";

export function Missing({ what, why, run }: { what: string; why: string; run: Run }) {
  if (run.indexed < 1) {
    return <p class="loading" role="status">Reading the run: {Math.floor(run.indexed * 100)}% of its files are read, and this {what} has not come yet.</p>;
  }
  return <Empty title={`This ${what} could not be read`} why={why} />;
}

/** Changes where something that was not there may have come: with new rows, and when the server answers again. */
export function newsOf(run: Run, error: string | null): string {
  return `${run.generation} ${run.version} ${run.indexed < 1} ${error ?? ""}`;
}

/** Changes with new rows as long as the run is still being read: until then an answer may be a part of what there is. */
export function partOf(run: Run): string {
  return run.indexed < 1 ? `${run.generation} ${run.version}` : "";
}
