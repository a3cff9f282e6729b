/** Shows what others wrote as text: never as markup, isolated in its direction, with invisible characters made visible. */
import { useMemo, useRef, useState } from "preact/hooks";
import { bytes, count } from "../format";
import { sentence, useVirtual } from "../hooks";
import { isCut, type Cut } from "../types";
import { pieces, spelled } from "../visible";

/** A short text inside a line. */
export function Text({ value, title, class: name = "" }: { value: string | null | undefined; title?: string; class?: string }) {
  const found = useMemo(() => pieces(value ?? ""), [value]);
  return (
    <bdi class={`text ${name}`} title={title && spelled(title)}>
      {found.map((piece, i) => (typeof piece === "string" ? piece : <span key={i} class="sign" title={piece.name}>{piece.glyph}</span>))}
    </bdi>
  );
}

const WHOLE = 20_000;
const CHUNK = 4_000;

/** A text of any length; a long one in a window of its own. `load` brings the rest of one that was cut. */
export function LongText({ value, load }: { value: string | Cut; load?: (path: string) => Promise<string> }) {
  const [whole, setWhole] = useState<string | null>(null);
  const [state, setState] = useState<"" | "reading" | string>("");
  const text = whole ?? (isCut(value) ? value.cut : value);
  const rest = isCut(value) && whole === null;
  const more = () => {
    if (!isCut(value) || !load) return;
    setState("reading");
    load(value.path).then((found) => { setWhole(found); setState(""); }, (error: unknown) => setState(sentence(error)));
  };
  return (
    <>
      {text.length <= WHOLE ? <div class="prose"><Text value={text} /></div> : <Chunks text={text} />}
      {rest && (
        <p class="more">
          The first {bytes(text.length)} of {bytes(value.length)}.{" "}
          {load && state !== "reading" && <button type="button" onClick={more}>Show all</button>}
          {state === "reading" ? "Reading." : state}
        </p>
      )}
    </>
  );
}

/** Where a long text is divided: behind a line's end where there is one, never inside a character. */
export function chunksOf(text: string, size = CHUNK): string[] {
  const found: string[] = [];
  for (let start = 0; start < text.length; ) {
    let end = Math.min(text.length, start + size);
    // Only in this chunk: a text without lines would be searched from its beginning for each.
    const line = start + text.slice(start, end).lastIndexOf("\n") + 1;
    if (end < text.length && line > start + size / 4) end = line;
    else if (end < text.length && (text.charCodeAt(end) & 0xfc00) === 0xdc00) end += 1;
    found.push(text.slice(start, end));
    start = end;
  }
  return found;
}

function Chunks({ text }: { text: string }) {
  const box = useRef<HTMLDivElement>(null);
  const chunks = useMemo(() => chunksOf(text), [text]);
  const list = useVirtual({
    count: chunks.length, getScrollElement: () => box.current, overscan: 2,
    estimateSize: (i) => 18 * Math.max(4, Math.ceil((chunks[i]?.length ?? 0) / 110)),
  });
  return (
    <>
      <div class="window" ref={box} tabIndex={0} role="document" aria-label={`Text of ${count(text.length)} characters`}>
        <div class="tall" style={{ height: `${list.getTotalSize()}px` }}>
          {list.getVirtualItems().map(({ index, start }) => (
            <div key={index} data-index={index} ref={(node: HTMLElement | null) => list.measureElement(node)} class="chunk prose" style={{ transform: `translateY(${start}px)` }}>
              <Text value={chunks[index] ?? ""} />
            </div>
          ))}
        </div>
      </div>
      <p class="more">{bytes(text.length)}.</p>
    </>
  );
}
