/** The own tokens of one turn: what was new in its prompt, then what was sampled; read in parts where they are many. */
import type { PartAnswer, Pieces, TokenPart, Turn } from "../types";

/** Tokens of one part, as the server cuts them. */
export const PART = 20_000;

export interface Token {
  /** Among the turn's own tokens. */
  index: number;
  /** In the turn's context. */
  position: number;
  sampled: boolean;
  id: number;
  text: string;
  /** A text stands for bytes or an id, or is one of a control token: it is no text of the conversation. */
  kind: "text" | "bytes" | "special" | "unknown";
  logprob: number | null;
  trainer: number | null;
  teacher: number | null;
  gradient: number | null;
  version: number | null;
  drawnAmong: number | null;
}

/** The texts of ids, as far as the tokenizer has told them. */
export class Texts {
  private texts = new Map<number, string>();
  private bytes = new Set<number>();
  private special = new Set<number>();

  constructor(found: Pieces) {
    this.add(found);
  }

  add(found: Pieces): void {
    for (const [id, text] of Object.entries(found.pieces)) this.texts.set(Number(id), text);
    for (const id of found.byte_pieces ?? []) this.bytes.add(id);
    for (const id of found.special ?? []) this.special.add(id);
  }

  of(id: number): Pick<Token, "text" | "kind"> {
    const text = this.texts.get(id);
    if (text === undefined) return { text: `#${id}`, kind: "unknown" };
    return { text, kind: this.bytes.has(id) ? "bytes" : this.special.has(id) ? "special" : "text" };
  }
}

export class TurnTokens {
  readonly numPrompt: number;
  readonly numSampled: number;
  private parts = new Map<number, TokenPart>();
  private asked = new Map<number, Promise<void>>();

  constructor(
    readonly turn: Turn,
    private readonly texts: Texts,
    private readonly ask: (offset: number) => Promise<PartAnswer>,
  ) {
    this.numPrompt = turn.num_prompt_new;
    this.numSampled = turn.num_completion;
    const held = turn.prompt_new_ids.length + turn.completion_ids.length;
    if (held >= Math.min(PART, this.length)) this.parts.set(0, turn);
  }

  get length(): number {
    return this.numPrompt + this.numSampled;
  }

  has(index: number): boolean {
    return this.parts.has(Math.floor(index / PART));
  }

  /** Read the part that holds this token. */
  load(index: number): Promise<void> {
    const part = Math.floor(index / PART);
    const known = this.asked.get(part);
    if (known) return known;
    const answer = this.ask(part * PART).then(
      (found) => {
        this.texts.add(found);
        this.parts.set(part, found.turn);
      },
      (error: unknown) => {
        this.asked.delete(part);
        throw error;
      },
    );
    this.asked.set(part, answer);
    return answer;
  }

  at(index: number): Token | null {
    const number = Math.floor(index / PART);
    const part = this.parts.get(number);
    if (!part || index >= this.length) return null;
    const inside = index - number * PART;
    const sampled = inside >= part.prompt_new_ids.length;
    const i = inside - part.prompt_new_ids.length;
    const id = sampled ? part.completion_ids[i] : part.prompt_new_ids[inside];
    if (id === undefined) return null;
    const value = (values: (number | null)[] | null | undefined) => (sampled ? (values?.[i] ?? null) : null);
    return {
      index, position: this.turn.prompt_shared + index, sampled, id, ...this.texts.of(id),
      logprob: value(part.logprobs), trainer: value(part.trainer_logprobs), teacher: value(part.teacher_logprobs),
      gradient: value(part.gradients), version: value(part.policy_versions),
      drawnAmong: value(part.kept_counts),
    };
  }

  /** The sampled tokens that have been read, for the scales of the colours. */
  *sampled(): Generator<TokenPart> {
    for (const part of this.parts.values()) yield part;
  }
}
