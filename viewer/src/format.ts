/** Numbers and dates as short texts. */

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value: number): string {
  return GROUPED.format(value);
}

/** Four significant digits; small and large ones with an exponent. "–" for a missing value. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e9) return GROUPED.format(value).replace("-", "−");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("-", "−").replace("e-", "e−").replace("e+", "e");
  const text = size >= 1000 ? GROUPED.format(value) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

/** With a sign, for advantages and differences. */
export function signed(value: number | null | undefined): string {
  const text = figure(value);
  return typeof value === "number" && value > 0 ? `+${text}` : text;
}

export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.001) return "<0.1%";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : share > 0.999 && share < 1 ? 2 : share === 1 || share === 0 ? 0 : 1)}%`;
}

/** As ticks of an axis: 1.2M, 30k, 0.05. */
export function tick(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0).replace("-", "−").replace("e-", "e−");
  return trim(value);
}

function trim(value: number): string {
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

export function bytes(length: number): string {
  if (length < 10_000) return `${count(length)} characters`;
  return length < 1e6 ? `${trim(Math.round(length / 1e3))}k characters` : `${(length / 1e6).toFixed(1)}M characters`;
}

export function seconds(value: number): string {
  return value < 0.001 ? `${(value * 1e6).toFixed(0)} µs` : value < 1 ? `${(value * 1e3).toFixed(0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function plural(amount: number, one: string, many = `${one}s`): string {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}
