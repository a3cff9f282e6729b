/** The tokens of one turn in their order, coloured; a long stream in a window of which only what is seen is drawn. */
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { count } from "../format";
import { sentence, useVirtual } from "../hooks";
import { mark } from "../marks";
import type { Cell } from "./cell";
import { colourTokens, drawTokens, tokenId } from "./draw";
import type { Mode } from "./modes";
import type { TurnTokens } from "./tokens";

/** Up to so many tokens are drawn at once. */
const AT_ONCE = 4_000;
const BLOCK = 400;

export interface Place {
  turn: number;
  index: number;
}

interface Props {
  tokens: TurnTokens;
  mode: Mode;
  /** The token under the pointer. */
  hover: Cell<Place | null>;
  /** The token that was chosen. */
  chosen: Cell<Place | null>;
  choose: (place: Place | null) => void;
  /** The first token to show: the context before it is folded away. */
  from: number;
}

export function Stream(props: Props) {
  const { tokens, hover, chosen, choose, from } = props;
  const { turn, length } = tokens;
  const box = useRef<HTMLDivElement>(null);
  const scroll = useRef<((index: number) => void) | null>(null);

  useEffect(() => {
    let shown: Element | null = null;
    const mark = () => {
      shown?.classList.remove("active");
      const place = chosen.get();
      shown = place?.turn === turn.index ? document.getElementById(tokenId(turn.index, place.index)) : null;
      shown?.classList.add("active");
      if (shown) box.current?.setAttribute("aria-activedescendant", shown.id);
      else box.current?.removeAttribute("aria-activedescendant");
    };
    mark();
    return chosen.watch(mark);
  }, [tokens, props.mode]);

  const under = (event: Event): Place | null => {
    const node = event.target instanceof Element ? event.target.closest<HTMLElement>(".t") : null;
    return node ? { turn: turn.index, index: Number(node.dataset.i) } : null;
  };
  const move = (index: number) => {
    const next = Math.max(from, Math.min(length - 1, index));
    choose({ turn: turn.index, index: next });
    scroll.current?.(next);
    requestAnimationFrame(() => document.getElementById(tokenId(turn.index, next))?.scrollIntoView({ block: "nearest" }));
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = chosen.get();
    const now = place?.turn === turn.index ? place.index : -1;
    const next = { ArrowRight: now < 0 ? tokens.numPrompt : now + 1, ArrowLeft: now - 1, ArrowDown: line(turn.index, now, 1), ArrowUp: line(turn.index, now, -1), Home: from, End: length - 1 }[event.key];
    if (next !== undefined) move(next);
    else if (event.key === "Escape" && place) choose(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const handlers = {
    onKeyDown,
    onMouseOver: (event: Event) => hover.set(under(event)),
    onMouseLeave: () => hover.set(null),
    onClick: (event: Event) => {
      const place = under(event);
      if (place && !String(getSelection())) choose(place);
    },
    onFocus: () => {
      if (chosen.get()?.turn !== turn.index && box.current?.matches(":focus-visible")) move(Math.min(tokens.numPrompt, length - 1));
    },
  };
  const label = `Tokens of turn ${turn.index}: ${count(tokens.numPrompt)} of context, ${count(tokens.numSampled)} sampled. Arrow keys move.`;
  const long = length - from > AT_ONCE;
  return (
    <div class={`tokens${long ? " window" : ""}`} ref={box} tabIndex={0} role="listbox" aria-label={label} {...handlers}>
      {long
        ? <Blocks {...props} box={box} scroll={scroll} />
        : <Block tokens={tokens} mode={props.mode} from={from} to={length} />}
    </div>
  );
}

/** The token nearest to this one on the next line, or on the one before. */
function line(turn: number, index: number, way: 1 | -1): number {
  const now = document.getElementById(tokenId(turn, index));
  if (!now) return Math.max(0, index + way);
  const { top, left, height } = now.getBoundingClientRect();
  let [best, nearest, row] = [index, Infinity, NaN];
  for (let i = index + way; ; i += way) {
    const node = document.getElementById(tokenId(turn, i));
    if (!node) return best;
    const box = node.getClientRects()[0] ?? node.getBoundingClientRect();
    if (Math.abs(box.top - top) < height / 2) continue;
    if (Number.isNaN(row)) row = box.top;
    if (Math.abs(box.top - row) > height / 2) return best;
    if (Math.abs(box.left - left) < nearest) [best, nearest] = [i, Math.abs(box.left - left)];
  }
}

interface BlockProps {
  tokens: TurnTokens;
  mode: Mode;
  from: number;
  to: number;
}

function Block({ tokens, mode, from, to }: BlockProps) {
  const box = useRef<HTMLDivElement>(null);
  const [read, setRead] = useState(0);
  const [error, setError] = useState("");
  const there = tokens.has(from) && tokens.has(Math.max(from, to - 1));
  const drawn = useRef("");
  useEffect(() => {
    if (there) return;
    const start = performance.now();
    Promise.all([tokens.load(from), tokens.load(to - 1)]).then(
      () => { setRead((n) => n + 1); mark("tokens", start, `${tokens.turn.index} ${from}`); },
      (failed: unknown) => setError(sentence(failed)),
    );
  }, [tokens, from, to, there]);
  useLayoutEffect(() => {
    if (!box.current || !there) return;
    const what = `${from} ${to} ${read}`;
    if (drawn.current === what && box.current.childElementCount) colourTokens(box.current, tokens, mode);
    else drawTokens(box.current, tokens, from, to, mode);
    drawn.current = what;
  }, [tokens, mode, from, to, read, there]);
  return (
    <>
      {!there && <span class="loading">{error || `Reading tokens ${count(from)} to ${count(to)}.`}</span>}
      <div class="block" ref={box} />
    </>
  );
}

type BlocksProps = Props & { box: { current: HTMLDivElement | null }; scroll: { current: ((index: number) => void) | null } };

function Blocks({ tokens, mode, from, box, scroll }: BlocksProps) {
  const blocks = Math.ceil((tokens.length - from) / BLOCK);
  const list = useVirtual({
    count: blocks, getScrollElement: () => box.current, estimateSize: () => 22 * 16, overscan: 1,
  });
  scroll.current = (index) => {
    if (!document.getElementById(tokenId(tokens.turn.index, index))) list.scrollToIndex(Math.floor((index - from) / BLOCK), { align: "center" });
  };
  return (
    <div class="tall" style={{ height: `${list.getTotalSize()}px` }}>
      {list.getVirtualItems().map(({ index, start }) => (
        <div key={index} data-index={index} ref={(node: HTMLElement | null) => list.measureElement(node)} class="chunk" style={{ transform: `translateY(${start}px)` }}>
          <Block tokens={tokens} mode={mode} from={from + index * BLOCK} to={Math.min(tokens.length, from + (index + 1) * BLOCK)} />
        </div>
      ))}
    </div>
  );
}
