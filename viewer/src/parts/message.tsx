/** One message of a conversation: who said it, its text, its calls. */
import { spelled } from "../visible";
import { LongText } from "./text";
import { isCut, type Json, type Message as Record, type ToolCall } from "../types";
import { Text } from "./text";

type Load = (path: string) => Promise<string>;

interface Call {
  id?: string;
  name: string;
  arguments: Json;
}

/** Calls as OpenAI's messages hold them, or flat. */
function callsOf(value: unknown): Call[] {
  if (!Array.isArray(value)) return [];
  return value.map((call: unknown) => {
    const outer = (call ?? {}) as { id?: string; name?: string; arguments?: Json; function?: { name?: string; arguments?: Json } };
    const inner = outer.function ?? outer;
    return { id: outer.id, name: String(inner.name ?? "?"), arguments: inner.arguments ?? null };
  });
}

export function json(value: unknown): string {
  if (typeof value === "string") return value;
  const short = JSON.stringify(value);
  return short.length <= 100 ? short : JSON.stringify(value, null, 2);
}

export function Message({ message, load }: { message: Record; load?: Load }) {
  const { role, content, reasoning_content: reasoning, name } = message;
  const calls = callsOf(message.tool_calls);
  const known = ["user", "assistant", "system", "tool", "developer"].includes(role) ? role : "other";
  return (
    <article class={`message ${known}`} aria-label={`${spelled(role)} said`}>
      <header>
        <span class="role"><Text value={role} /></span>
        {name && <Text class="name" value={name} />}
        {message.tool_call_id && <span class="call-id">answers <Text value={message.tool_call_id} /></span>}
      </header>
      {reasoning && <div class="reasoning"><span class="label">reasoning</span><LongText value={reasoning} load={load} /></div>}
      <Content content={content} load={load} bare={calls.length === 0 && !reasoning} />
      {calls.map((call, i) => (
        <div key={i} class="call">
          <div class="call-head"><span class="label">calls</span><Text class="name" value={call.name} />{call.id && <span class="call-id"><Text value={call.id} /></span>}</div>
          {isCut(call.arguments) ? <LongText value={call.arguments} load={load} /> : <div class="code"><LongText value={json(call.arguments)} /></div>}
        </div>
      ))}
    </article>
  );
}

function Content({ content, load, bare }: { content: unknown; load?: Load; bare: boolean }) {
  if (content === null || content === undefined || content === "") return bare ? <p class="none">no text</p> : null;
  if (typeof content === "string" || isCut(content)) return <LongText value={content} load={load} />;
  if (Array.isArray(content)) {
    return (
      <>
        {content.map((part: unknown, i) => {
          const text = part && typeof part === "object" && "text" in part ? part.text : part;
          return typeof text === "string" || isCut(text) ? <LongText key={i} value={text} load={load} /> : <div key={i} class="code"><LongText value={json(part)} /></div>;
        })}
      </>
    );
  }
  return <div class="code"><LongText value={json(content)} /></div>;
}

/** Attempted calls that could not be carried out, as the record of the turn has them. */
export function FailedCalls({ calls }: { calls: ToolCall[] | null }) {
  const failed = (calls ?? []).filter(({ status }) => status && status !== "ok");
  return (
    <>
      {failed.map((call, i) => (
        <div key={i} class="call failed">
          <div class="call-head"><span class="label">call not carried out: <Text value={call.status?.replaceAll("_", " ")} /></span></div>
          {call.raw !== undefined && <div class="code"><LongText value={call.raw} /></div>}
        </div>
      ))}
    </>
  );
}
