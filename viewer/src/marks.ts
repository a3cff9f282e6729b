/** Marks that the benchmark reads; docs/viewer.md lists them. */

export type Shown = "overview" | "table" | "trajectory" | "group" | "tokens";

/** After the frame in which the present changes are painted. */
function painted(then: () => void): void {
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = then;
    channel.port2.postMessage(0);
  });
}

/**
 * Sets the mark `verbatim:NAME` when what was drawn now is painted; `detail` has the text, and the milliseconds since it
 * was asked for.
 *
 * Args: `asked` in the time of performance.now(); 0 is the opening of the page.
 */
export function mark(name: Shown, asked: number, text = ""): void {
  painted(() => performance.mark(`verbatim:${name}`, { detail: { text, milliseconds: performance.now() - asked } }));
}
