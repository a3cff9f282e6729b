/** Which messages belong to which turn. */
import type { Message, Turn } from "./types";

export interface Scene {
  turn: Turn | null;
  /** What was said to the model before it. */
  before: Message[];
  /** What the model said; null where the conversation does not hold it. */
  said: Message | null;
}

/**
 * The assistant's messages and the turns of the agent whose conversation it is are matched from the end: what stands
 * before the first turn may hold examples of answers.
 */
export function scenes(messages: Message[], turns: Turn[]): Scene[] {
  const agent = turns.some((turn) => turn.agent === "main") ? "main" : turns[0]?.agent;
  const own = turns.filter((turn) => turn.agent === agent);
  const spoken = messages.flatMap((message, i) => (message.role === "assistant" ? [i] : []));
  const matched = new Map<Turn, number>();
  const from = Math.max(0, spoken.length - own.length);
  const skipped = Math.max(0, own.length - spoken.length);
  own.slice(skipped).forEach((turn, i) => {
    const at = spoken[from + i];
    if (at !== undefined) matched.set(turn, at);
  });
  let next = 0;
  const found: Scene[] = turns.map((turn) => {
    const at = matched.get(turn);
    if (at === undefined) return { turn, before: [], said: null };
    const before = messages.slice(next, at);
    next = at + 1;
    return { turn, before, said: messages[at] ?? null };
  });
  const after = messages.slice(next);
  return after.length ? [...found, { turn: null, before: after, said: null }] : found;
}

/** The messages before the assistant speaks. */
export function opening(messages: Message[]): Message[] {
  const first = messages.findIndex(({ role }) => role === "assistant");
  return first < 0 ? messages : messages.slice(0, first);
}
