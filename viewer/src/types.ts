/** What the server answers; docs/viewer.md describes each answer. */

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export interface Run {
  id: number;
  name: string;
  folder: string;
  state: "running" | "finished" | "stopped" | "failed" | "unknown";
  step: number;
  max_steps: number | null;
  num_trajectories: number;
  num_alarms: number;
  /** How much of the run folder the index has read, 0 to 1. */
  indexed: number;
  /** Another one: a resumed run did some steps again, and what is held of it is out of date. */
  generation: number;
  /** Another one: the index has other rows. */
  version: number;
  problems: string[];
  tokenizer: string | null;
  tokenizer_problem: string | null;
}

export interface Alarm {
  name: string;
  step: number;
  state: "raised" | "cleared";
  message: string;
  cause: string;
  advice: string;
  evidence: Record<string, number | null>;
  env: string | null;
  trajectory_ids: string[];
}

export type Interval = [number, number];

export interface Evaluation {
  step: number;
  env: string;
  metrics: Record<string, number | null> & { intervals?: Record<string, Interval> };
}

export interface MetricName {
  unit: string;
  about: string;
}

export interface MetricsAnswer {
  steps: number[];
  columns: Record<string, (number | null)[]>;
  evals: Evaluation[];
  alarms: Alarm[];
  names: Record<string, MetricName | [string, string]>;
  generation?: number;
  why?: string | null;
  evals_why?: string | null;
}

export interface Row {
  /** Names it in paths: ids of evaluation episodes repeat. */
  key: string;
  group_key: string;
  kind: "train" | "eval";
  trajectory_id: string;
  step: number;
  env: string | null;
  example_id: string | null;
  group_id: string | null;
  sample_index: number;
  reward: number | null;
  advantage: number | null;
  /** Why nothing of it is trained; null where single turns decide. */
  reason: string | null;
  flags: string[];
  error: Text | null;
  stop_reason: string | null;
  truncated: boolean;
  num_turns: number;
  num_sampled_tokens: number;
  num_trained_tokens: number;
  num_breaks: number;
}

export interface RowsAnswer {
  total: number;
  matched: number;
  rows: Row[];
  /** Messages are still being searched: ask again. */
  pending: boolean;
  why?: string | null;
}

export interface Facets {
  kind: Record<string, number>;
  env: Record<string, number>;
  stop_reason: Record<string, number>;
  reason: Record<string, number>;
  flag: Record<string, number>;
  step: [number | null, number | null] | null;
  reward: [number | null, number | null] | null;
}

/** A long text of which the answer holds the beginning. */
export interface Cut {
  cut: string;
  length: number;
  path: string;
}

export type Text = string | Cut;

export interface ToolCall {
  name?: Text | null;
  arguments?: Json;
  status?: string;
  raw?: Text;
  id?: string;
}

export interface Message {
  role: string;
  content?: Json | Cut;
  reasoning_content?: Text | null;
  tool_calls?: Json;
  tool_call_id?: string;
  name?: string;
  [key: string]: unknown;
}

export interface Break {
  reason: string;
  words: string[];
}

type Numbers = (number | null)[] | null;

/** The token streams of one turn, or of a part of it. */
export interface TokenPart {
  prompt_new_ids: number[];
  completion_ids: number[];
  logprobs: Numbers;
  trainer_logprobs: Numbers;
  gradients: Numbers;
  policy_versions: Numbers;
  teacher_logprobs: Numbers;
  /** How many ids each token was drawn among; 0 where nothing was cut. */
  kept_counts: Numbers;
}

export interface Turn extends TokenPart {
  index: number;
  agent: string;
  outcome: string;
  trained?: boolean;
  advantage: number | null;
  reward: number | null;
  stop_reason: string | null;
  temperature: number | null;
  parse_status: string | null;
  tool_calls: ToolCall[] | null;
  prompt_of_turn: number | null;
  prompt_shared: number;
  /** The turn whose context the prompt continues exactly. */
  extends: number | null;
  num_prompt_tokens: number;
  num_prompt_new: number;
  num_completion: number;
  timing: { queued: number | null; generated: number | null; tools: number | null } | null;
  break: Break | null;
  state_key?: string | null;
}

/** The text of each id; those of `byte_pieces` are no whole characters, those of `special` control tokens. */
export interface Pieces {
  pieces: Record<string, string>;
  byte_pieces: number[];
  special: number[];
}

export interface PartAnswer extends Pieces {
  turn: TokenPart & { index: number; offset: number };
}

export interface Trajectory extends Row, Pieces {
  reward_parts: Record<string, number | null>;
  agent_rewards: Record<string, number | null>;
  messages: Message[];
  tools: Json;
  info: Json;
  seed?: number | string | null;
  turns: Turn[];
  tokens_omitted: number;
  problems?: string[];
  num_unrecorded_tokens?: number;
  unrecorded?: string | null;
}

export interface TreeNode {
  id: number;
  parent: number | null;
  /** Position of its first token in the context. */
  start: number;
  num_tokens: number;
  /** The beginning of its text; null without a tokenizer. */
  text: string | null;
  /** Indices into the group's rows. */
  trajectories: number[];
  /** How many of its tokens some trajectory trains. */
  trained: number;
}

export interface Group {
  rows: Row[];
  tree: { nodes: TreeNode[] } | null;
}

export function isCut(value: unknown): value is Cut {
  return typeof value === "object" && value !== null && "cut" in value && "path" in value && "length" in value;
}

export function textOf(value: Text): string {
  return isCut(value) ? value.cut : value;
}
