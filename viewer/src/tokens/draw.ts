/** Makes the elements of tokens: text nodes and signs, never markup. */
import { pieces } from "../visible";
import type { Mode } from "./modes";
import type { Token, TurnTokens } from "./tokens";

function sign(glyph: string, title: string): HTMLElement {
  const node = document.createElement("span");
  node.className = "sign";
  node.title = title;
  node.textContent = glyph;
  return node;
}

function appendText(node: HTMLElement, text: string, ended: boolean): void {
  if (text === "" && !ended) {
    node.append(sign("∅", "a token without text"));
    return;
  }
  if (/^ +$/.test(text)) {
    node.append(sign("·".repeat(Math.min(text.length, 40)), `${text.length} spaces`));
    return;
  }
  for (const piece of pieces(text)) {
    if (typeof piece !== "string") {
      node.append(sign(piece.glyph, piece.name));
      continue;
    }
    for (const part of piece.split(/([\n\t])/)) {
      if (part === "\n") node.append(sign("↵", "line feed"), "\n");
      else if (part === "\t") node.append(sign("⇥", "tab"), "\t");
      else if (part) node.append(part);
    }
  }
  if (ended) node.append(sign("↵", "line feed"));
}

export function tokenId(turn: number, index: number): string {
  return `token-${turn}-${index}`;
}

function classOf(token: Token, tokens: TurnTokens, mode: Mode): string {
  return `t ${mode.of(token, tokens)}${token.kind === "special" ? " special" : ""}`;
}

export function drawTokens(box: HTMLElement, tokens: TurnTokens, from: number, to: number, mode: Mode): void {
  const fragment = document.createDocumentFragment();
  for (let i = from; i < to; i++) {
    const token = tokens.at(i);
    if (!token) continue;
    const node = document.createElement("span");
    node.id = tokenId(tokens.turn.index, i);
    node.className = classOf(token, tokens, mode);
    node.dataset.testid = "token";
    node.dataset.i = String(i);
    node.setAttribute("role", "option");
    if (token.kind === "bytes") node.append(sign(token.text, "bytes that are no whole character"));
    else if (token.kind === "unknown") node.append(sign(token.text, "the tokenizer has no text for it"));
    else appendText(node, token.text.replace(/\n$/, ""), token.text.endsWith("\n"));
    fragment.append(node);
    if (token.kind === "text" && token.text.endsWith("\n")) fragment.append("\n"); // behind it, so that no outline spans two lines
  }
  box.replaceChildren(fragment);
}

export function colourTokens(box: HTMLElement, tokens: TurnTokens, mode: Mode): void {
  for (const node of box.children as Iterable<Element> & HTMLCollection) {
    const token: Token | null = tokens.at(Number((node as HTMLElement).dataset.i));
    if (token) node.className = classOf(token, tokens, mode) + (node.classList.contains("active") ? " active" : "");
  }
}
