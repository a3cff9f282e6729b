/** Layers on each other as the lines of a chart: each is drawn as the area below its sum, the topmost first. */
import type { Line } from "./chart";
import type { Layer } from "./specs";
import { count, percent, seconds } from "../format";

/**
 * Args: `share` divides each step by its sum.
 *
 * Example: layers [1, 3] and [1, 1] as shares are drawn at [1, 1] (the upper one) and [0.5, 0.75].
 */
export function stack(xs: number[], layers: Layer[], share: boolean, unit: "tokens" | "seconds"): Line[] {
  const sums = xs.map((_, i) => layers.reduce((sum, { values }) => sum + (values[i] ?? 0), 0));
  const below = new Array<number>(xs.length).fill(0);
  const lines = layers.map(({ label, colour, values }) => {
    const says = values.map((value, i) => {
      if (value === null) return null;
      const amount = unit === "tokens" ? count(value) : seconds(value);
      return share ? `${percent(value / (sums[i] || 1))} · ${amount}` : amount;
    });
    const ys = xs.map((_, i) => {
      below[i] = (below[i] ?? 0) + (values[i] ?? 0);
      return share ? (sums[i] ? (below[i] ?? 0) / (sums[i] ?? 1) : null) : (below[i] ?? 0);
    });
    return { label, colour, xs, ys, says };
  });
  return lines.reverse();
}
