/** A card with curves over the steps: uPlot draws, the legend says the values at the cursor. */
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { ComponentChildren } from "preact";
import uPlot from "uplot";
import { figure, tick } from "../format";
import { useSeen } from "../hooks";
import { colour, useColours } from "../theme";
import { Text } from "../parts/text";
import { spelled } from "../visible";
import type { Alarm } from "../types";

export interface Line {
  label: string;
  /** A name of the style sheet's colours. */
  colour: string;
  dash?: number[];
  xs: number[];
  ys: (number | null)[];
  /** What the legend says of each value, where it is not the height that is drawn. */
  says?: (string | null)[];
  /** What stands behind the value and its interval in the legend. */
  note?: string[];
  points?: boolean;
  low?: (number | null)[];
  high?: (number | null)[];
}

export interface ChartProps {
  title: string;
  unit: string;
  about: string;
  lines: Line[];
  /** Lines are layers on each other, drawn as areas. */
  stacked?: boolean;
  low?: number;
  high?: number;
  height?: number;
  alarms: Alarm[];
  /** The metrics that are drawn: alarms that name one of them get a line. */
  metrics: string[];
  zoom: [number, number] | null;
  onZoom: (range: [number, number] | null) => void;
  smooth: number;
  wide?: boolean;
  /** Stands beside the title. */
  beside?: ComponentChildren;
}

/** Exponential moving average, corrected for its start; missing values stay missing. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function aligned(lines: Line[], ys: (number | null)[][]): uPlot.AlignedData {
  const first = lines[0]?.xs ?? [];
  if (lines.every(({ xs }) => xs === first)) return [first, ...ys];
  return uPlot.join(lines.map(({ xs }, i) => [xs, ys[i] ?? []]));
}

/** The value of a line at this x, or its last one before. */
function said(line: Line, x: number | null): string {
  let i = line.xs.length - 1;
  if (x !== null) while (i >= 0 && (line.xs[i] ?? 0) > x) i--;
  else while (i >= 0 && line.ys[i] === null) i--;
  const text = line.says?.[i];
  if (text) return text;
  const [low, high] = [line.low?.[i], line.high?.[i]];
  const interval = typeof low === "number" && typeof high === "number" ? ` [${low.toFixed(3)}, ${high.toFixed(3)}]` : "";
  return `${figure(line.ys[i])}${interval}${line.note?.[i] ? `, ${line.note[i]}` : ""}`;
}

export function Chart(props: ChartProps) {
  const { title, unit, about, lines, height = 148 } = props;
  const [seen, isSeen] = useSeen();
  const box = useRef<HTMLDivElement>(null);
  const values = useRef<(HTMLElement | null)[]>([]);
  const at = useRef<HTMLElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const colours = useColours();

  const heights = useMemo(
    () => (props.smooth && !props.stacked
      ? lines.map(({ ys, points }) => (points ? ys : smoothed(ys, props.smooth)))
      : lines.map(({ ys }) => ys)),
    [lines, props.smooth, props.stacked],
  );
  const data = useMemo(() => aligned(lines, heights), [lines, heights]);
  const shape = lines.map((line) => `${line.label}${line.colour}${line.points}`).join("|");

  function say(x: number | null): void {
    latest.current.lines.forEach((line, i) => {
      const node = values.current[i];
      if (node) node.textContent = said(line, x);
    });
    if (!at.current) return;
    const near = x === null ? null : alarmAt(plot.current, latest.current, x);
    at.current.textContent = near ? `step ${near.step}: ${spelled(near.message)}` : x === null ? latest.current.unit : `step ${x}`;
    at.current.classList.toggle("alarmed", near !== null);
  }

  useEffect(() => {
    if (!isSeen || !box.current) return;
    const own = new uPlot(options(() => latest.current, box.current.clientWidth, height, say), data, box.current);
    plot.current = own;
    const resized = new ResizeObserver(() => {
      const width = box.current?.clientWidth ?? 0;
      if (width > 0 && width !== own.width) own.setSize({ width, height });
    });
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      own.destroy();
      plot.current = null;
    };
  }, [isSeen, shape, colours, height]);

  useEffect(() => {
    plot.current?.setData(data);
    say(null);
  }, [data, props.zoom, props.alarms]);

  function onKeyDown(event: KeyboardEvent): void {
    const own = plot.current;
    if (!own || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = own.data[0];
    if (event.key === "Escape") {
      own.setCursor({ left: -10, top: -10 });
      props.onZoom(null);
      return;
    }
    const now = own.cursor.idx ?? (event.key === "ArrowLeft" ? xs.length : -1);
    const next = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : now + (event.key === "ArrowLeft" ? -1 : 1);
    const x = xs[Math.max(0, Math.min(xs.length - 1, next))];
    if (x !== undefined) own.setCursor({ left: own.valToPos(x, "x"), top: height / 3 });
  }

  return (
    <section class={`card chart${props.wide ? " wide" : ""}`} ref={seen}>
      <header>
        <h3><Text value={title} title={about} /></h3>
        {props.beside}
        <span class="at" ref={at} aria-live="polite">{unit}</span>
      </header>
      <div
        class="plot" ref={box} tabIndex={0} role="img" onKeyDown={onKeyDown}
        style={{ height: `${height}px` }}
        aria-label={spelled(`${title}${unit ? `, ${unit}` : ""}: ${lines.map((line) => `${line.label} ${said(line, null)}`).join(", ")}. Arrow keys move along the steps.`)}
      />
      <ul class={`legend${lines.length === 1 && lines[0]?.label === title.toLowerCase() ? " single" : ""}`}>
        {(props.stacked ? lines.map((line, i) => ({ line, i })).reverse() : lines.map((line, i) => ({ line, i }))).map(({ line, i }) => (
          <li key={line.label}>
            <i class={`swatch${line.dash ? " dashed" : ""}`} style={{ color: `var(${line.colour})` }} />
            <span class="label"><Text value={line.label} /></span>
            <output ref={(node: HTMLElement | null) => { values.current[i] = node; }}>{said(line, null)}</output>
          </li>
        ))}
      </ul>
    </section>
  );
}

function alarmAt(plot: uPlot | null, props: ChartProps, x: number): Alarm | null {
  if (!plot) return null;
  const here = plot.valToPos(x, "x");
  const near = props.alarms.filter((alarm) => Math.abs(plot.valToPos(alarm.step, "x") - here) < 5);
  return near.find((alarm) => touches(alarm, props)) ?? null;
}

/** Whether an alarm is about what this card shows. */
function touches(alarm: Alarm, { metrics }: ChartProps): boolean {
  return Object.keys(alarm.evidence).some((name) => metrics.includes(name));
}

function options(now: () => ChartProps, width: number, height: number, say: (x: number | null) => void): uPlot.Options {
  const { lines, stacked } = now();
  const [text, grid] = [colour("--muted"), colour("--grid")];
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: text, font, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
  return {
    width, height,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (_, low, high) => now().zoom ?? (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { range: (_, low, high) => limits(now(), low, high) },
    },
    axes: [
      { ...axis, size: 22, gap: 4, space: 60, grid: { show: false }, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? tick(v) : "")) },
      { ...axis, size: 46, gap: 5, space: 30, values: (_, ticks) => ticks.map(tick) },
    ],
    series: [{}, ...lines.map((line) => {
      const stroke = colour(line.colour);
      return {
        stroke, width: stacked ? 0 : 1.75, dash: line.dash, spanGaps: true,
        ...(stacked ? { fill: stroke } : {}),
        points: line.points ? { show: true, size: 6, fill: stroke } : { show: line.xs.length < 2, size: 5, fill: stroke },
      };
    })],
    cursor: {
      sync: { key: "steps", scales: ["x", null] },
      y: false,
      points: { size: 6, width: 1 },
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => { now().onZoom(null); return null; } },
    },
    hooks: {
      setCursor: [(plot) => {
        const i = plot.cursor.idx;
        say(i === null || i === undefined ? null : (plot.data[0][i] ?? null));
      }],
      setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (high - low >= 1) now().onZoom([Math.floor(low), Math.ceil(high)]);
      }],
      draw: [(plot) => drawBars(plot, now()), (plot) => drawAlarms(plot, now())],
    },
  };
}

function limits(props: ChartProps, low: number | null, high: number | null): [number, number] {
  const least = props.low ?? low ?? 0;
  const most = props.high ?? high ?? 1;
  const bars = props.lines.flatMap((line) => [...(line.low ?? []), ...(line.high ?? [])]).filter((v) => v !== null);
  const from = Math.min(least, ...bars);
  const to = Math.max(most, ...bars);
  if (from === to && props.low === from) return [from, from + 1];
  if (from === to) return [from - (Math.abs(from) || 1) * 0.1, to + (Math.abs(to) || 1) * 0.1];
  const space = (to - from) * 0.06;
  return [props.low !== undefined && low !== null && low >= props.low ? props.low : from - space,
    props.high !== undefined && high !== null && high <= props.high ? props.high : to + space];
}

/** Vertical bars from low to high: intervals. */
function drawBars(plot: uPlot, { lines }: ChartProps): void {
  const { ctx } = plot;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const line of lines) {
    if (!line.low || !line.high) continue;
    ctx.strokeStyle = colour(line.colour);
    line.xs.forEach((x, i) => {
      const [low, high] = [line.low?.[i], line.high?.[i]];
      if (typeof low !== "number" || typeof high !== "number") return;
      const [left, top, bottom] = [plot.valToPos(x, "x", true), plot.valToPos(high, "y", true), plot.valToPos(low, "y", true)];
      const cap = 3 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(left, top);
      ctx.lineTo(left, bottom);
      for (const y of [top, bottom]) {
        ctx.moveTo(left - cap, y);
        ctx.lineTo(left + cap, y);
      }
      ctx.stroke();
    });
  }
  ctx.restore();
}

/** A triangle above each alarm's step, filled where it was raised; a line where the alarm is about this card. */
function drawAlarms(plot: uPlot, props: ChartProps): void {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const alarm of props.alarms) {
    const x = plot.valToPos(alarm.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const own = touches(alarm, props);
    ctx.strokeStyle = ctx.fillStyle = colour(own ? "--alarm" : "--alarm-faint");
    const size = (own ? 5 : 3.5) * devicePixelRatio;
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top - 1.6 * size);
    ctx.lineTo(x + size, bbox.top - 1.6 * size);
    ctx.lineTo(x, bbox.top);
    ctx.closePath();
    if (alarm.state === "raised") ctx.fill();
    else ctx.stroke();
    if (!own) continue;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.restore();
}
