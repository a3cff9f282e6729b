/**
 * The prefix tree of a group: from left to right the positions in the context, from top to bottom the trajectories. A node
 * is as wide as its tokens and as high as the trajectories that share them.
 */
import { useMemo, useState } from "preact/hooks";
import { count, figure, plural, tick } from "../format";
import { go, link } from "../route";
import type { Row, TreeNode } from "../types";
import { spelled } from "../visible";
import { Text } from "./text";

const LINE = 22;
const WIDTH = 1000;

interface Placed {
  node: TreeNode;
  top: number;
  height: number;
}

/** Where each node stands: leaves in the order of the walk, a parent beside all of its children. */
export function place(nodes: TreeNode[]): { placed: Placed[]; lines: number[][] } {
  const children = new Map<number | null, TreeNode[]>();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const placed: Placed[] = [];
  const lines: number[][] = [];
  // Without recursion: a conversation of a thousand turns is a thousand nodes deep.
  const walk: (TreeNode | { closed: Placed })[] = [...(children.get(null) ?? [])].reverse();
  while (walk.length) {
    const next = walk.pop();
    if (!next) break;
    if ("closed" in next) {
      next.closed.height = Math.max(1, lines.length - next.closed.top);
      continue;
    }
    const own: Placed = { node: next, top: lines.length, height: 1 };
    placed.push(own);
    const below = children.get(next.id) ?? [];
    if (below.length === 0) lines.push(next.trajectories);
    walk.push({ closed: own }, ...[...below].reverse());
  }
  return { placed, lines };
}

export function Tree({ rows, nodes, run }: { rows: Row[]; nodes: TreeNode[]; run: number }) {
  const [shown, show] = useState<TreeNode | null>(null);
  const { placed, lines } = useMemo(() => place(nodes), [nodes]);
  const end = Math.max(1, ...nodes.map(({ start, num_tokens }) => start + num_tokens));
  const stored = nodes.reduce((sum, { num_tokens }) => sum + num_tokens, 0);
  const asRows = placed.reduce((sum, { node, height }) => sum + node.num_tokens * Math.max(height, 1), 0);
  const x = (token: number) => (token / end) * WIDTH;
  const height = lines.length * LINE;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * end));
  return (
    <div class="tree">
      <p class="hint">
        {plural(stored, "token")} in the tree, {count(asRows)} as rows: {(asRows / stored).toFixed(1)} times as many. The stronger its colour, the more of a node is trained.
      </p>
      <div class="tree-box">
        <svg viewBox={`0 0 ${WIDTH} ${height + 18}`} preserveAspectRatio="none" role="img" aria-label={`Prefix tree of ${rows.length} trajectories, ${count(end)} tokens deep`} height={height + 18}>
          {placed.map(({ node, top, height: lines_ }) => (
            <g key={node.id} class={`node${node.trained ? " trained" : ""}${shown?.id === node.id ? " shown" : ""}`} tabIndex={0} role="button"
              aria-label={`${count(node.num_tokens)} tokens from ${count(node.start)}, shared by ${node.trajectories.length}`}
              onMouseEnter={() => show(node)} onFocus={() => show(node)}
              onClick={() => openNode(node, rows, run)} onKeyDown={(event) => event.key === "Enter" && openNode(node, rows, run)}>
              <rect x={x(node.start)} y={top * LINE + 1} width={Math.max(1, x(node.num_tokens) - 1)} height={lines_ * LINE - 2} fill-opacity={node.trained ? 0.18 + (0.72 * node.trained) / node.num_tokens : undefined} />
            </g>
          ))}
          {ticks.map((token) => <line key={token} class="rule" x1={x(token)} x2={x(token)} y1={0} y2={height} />)}
        </svg>
        <ol class="leaves">
          {lines.map((found, i) => (
            <li key={i}>
              <Leaf rows={found.flatMap((at) => rows[at] ?? [])} run={run} />
            </li>
          ))}
        </ol>
        <div class="ticks" aria-hidden="true">{ticks.map((token) => <span key={token}>{tick(token)}</span>)}</div>
      </div>
      <p class="node-text" aria-live="polite">
        {shown
          ? <><span class="of">tokens {count(shown.start)} to {count(shown.start + shown.num_tokens)}, {shown.trained ? `${count(shown.trained)} trained` : "none trained"}, of {shown.trajectories.length === rows.length ? "all" : shown.trajectories.map((at) => rows[at]?.sample_index).join(", ")}:</span> <Text value={shown.text ?? "no tokenizer was found, so there is no text"} /></>
          : <span class="of">Point at a node to read it.</span>}
      </p>
    </div>
  );
}

/** The trajectories that end here, and what they earned. */
function Leaf({ rows, run }: { rows: Row[]; run: number }) {
  const shown = rows.slice(0, 4);
  const rewards = [...new Set(rows.map(({ reward }) => figure(reward)))];
  return (
    <>
      {shown.map((row) => <a key={row.key} href={link("trajectory", run, row.key)} title={spelled(row.trajectory_id)}>{row.sample_index}</a>)}
      {rows.length > shown.length && <span class="of">+{rows.length - shown.length} </span>}
      <b title="reward">{rewards.slice(0, 2).join(", ")}</b>
    </>
  );
}

function openNode(node: TreeNode, rows: Row[], run: number): void {
  const row = rows[node.trajectories[0] ?? -1];
  if (row) go(link("trajectory", run, row.key));
}
