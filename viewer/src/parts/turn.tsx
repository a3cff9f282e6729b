/** One turn: what was said, the token stream under it, and the break before it where there is one. */
import { count, figure, seconds, signed } from "../format";
import type { Scene } from "../conversation";
import { useSeen } from "../hooks";
import type { Cell } from "../tokens/cell";
import type { Mode } from "../tokens/modes";
import { Stream, type Place } from "../tokens/stream";
import type { TurnTokens } from "../tokens/tokens";
import type { Break, Trajectory, Turn } from "../types";
import { TrajectoryOutcome } from "./outcome";
import { FailedCalls, Message } from "./message";
import { Text } from "./text";

interface Props {
  trajectory: Trajectory;
  scene: Scene;
  tokens: TurnTokens | null;
  mode: Mode;
  hover: Cell<Place | null>;
  chosen: Cell<Place | null>;
  choose: (place: Place | null) => void;
  load: (path: string) => Promise<string>;
  /** Whether the tokens that are new in the prompt are shown too. */
  context: boolean;
  /** Drawn at once, wherever it stands: a link points at it. */
  now: boolean;
}

export function TurnView(props: Props) {
  const { scene, tokens, load, now } = props;
  const [ref, near] = useSeen("1200px");
  const seen = near || now;
  const { turn, before, said } = scene;
  return (
    <section class={`turn${turn?.break ? " broken" : ""}`} id={turn ? `turn-${turn.index}` : undefined} ref={ref} aria-label={turn ? `Turn ${turn.index}` : "After the last turn"}>
      {!seen && <div class="unread" />}
      {seen && before.map((message, i) => <Message key={i} message={message} load={load} />)}
      {turn && <Head {...props} turn={turn} />}
      {turn?.break && <BreakNote found={turn.break} turn={turn} />}
      {seen && said && <Message message={said} load={load} />}
      {seen && turn && !said && <p class="none said-nothing">{turn.agent === "main" ? "The conversation that was kept does not hold this turn's message; its tokens are below." : <>The tokens of agent <Text value={turn.agent} />; its messages are not kept.</>}</p>}
      {seen && turn && <FailedCalls calls={turn.tool_calls} />}
      {seen && tokens && <Tokens {...props} tokens={tokens} />}
    </section>
  );
}

function Head({ trajectory, turn, tokens }: Props & { turn: Turn }) {
  const versions = turn.policy_versions?.filter((version): version is number => version !== null) ?? [];
  const [low, high] = [Math.min(...versions.slice(0, 1e5)), Math.max(...versions.slice(0, 1e5))];
  const advantage = turn.advantage ?? trajectory.advantage;
  const { timing } = turn;
  return (
    <header class="turn-head">
      <h3>Turn {turn.index}</h3>
      {turn.agent !== "main" && <span class="tag"><Text value={turn.agent} /></span>}
      <TrajectoryOutcome outcome={turn.outcome} />
      {advantage !== null && <span>advantage <b>{signed(advantage)}</b></span>}
      {turn.reward !== null && <span>reward <b>{figure(turn.reward)}</b></span>}
      <span title="tokens that are new in its prompt, and tokens it sampled"><b>{count(tokens?.numPrompt ?? 0)}</b> + <b>{count(tokens?.numSampled ?? 0)}</b> tokens</span>
      {turn.stop_reason && <span class={turn.stop_reason === "length" ? "warned" : ""}>ended by <b><Text value={turn.stop_reason} /></b></span>}
      {versions.length > 0 && <span>version <b>{low === high ? low : `${low}–${high}`}</b></span>}
      {turn.temperature !== null && turn.temperature !== 1 && <span>temperature <b>{figure(turn.temperature)}</b></span>}
      {turn.parse_status && turn.parse_status !== "ok" && <span class="tag error"><Text value={turn.parse_status.replaceAll("_", " ")} /></span>}
      {timing && <span class="timing" title="from the request to its first token processed; to the last sampled token; in tools and environment">{times(timing)}</span>}
    </header>
  );
}

function times({ queued, generated, tools }: NonNullable<Turn["timing"]>): string {
  const said = [["queued", queued], ["generated", generated], ["tools", tools]] as const;
  return said.flatMap(([name, value]) => (value === null ? [] : [`${name} ${seconds(value)}`])).join(", ");
}

function BreakNote({ found, turn }: { found: Break; turn: Turn }) {
  return (
    <aside class="break" aria-label="Break">
      <p><b>Break: {found.reason.replaceAll("_", " ")}</b> <span class="of">{turn.prompt_of_turn === null
        ? "The prompt begins anew." : `The prompt shares ${count(turn.prompt_shared)} tokens with turn ${turn.prompt_of_turn} and differs behind them.`}</span></p>
      {found.words.length > 0 && <pre tabIndex={0}>{found.words.map((line, i) => <span key={i}><Text value={line} />{"\n"}</span>)}</pre>}
    </aside>
  );
}

function Tokens({ tokens, mode, hover, chosen, choose, context }: Props & { tokens: TurnTokens }) {
  if (tokens.length === 0) return <p class="none">No token was recorded.</p>;
  return (
    <div class="stream">
      <Stream tokens={tokens} mode={mode} hover={hover} chosen={chosen} choose={choose} from={context ? 0 : tokens.numPrompt} />
    </div>
  );
}
