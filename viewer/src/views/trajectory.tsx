/** One trajectory: its figures, the conversation turn by turn, and every token's values. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { scenes } from "../conversation";
import { bytes, count, figure, plural, signed } from "../format";
import { useAnswer, useKeys } from "../hooks";
import { mark } from "../marks";
import { Copy } from "../parts/copy";
import { Empty } from "../parts/empty";
import { outcomeColour, RowOutcome } from "../parts/outcome";
import { Inspector } from "../parts/inspector";
import { json } from "../parts/message";
import { Missing, partOf } from "../parts/missing";
import { Siblings } from "../parts/siblings";
import { LongText, Text } from "../parts/text";
import { TurnView } from "../parts/turn";
import { go, link, setParams, type Route } from "../route";
import { shownList } from "../rows";
import type { Source } from "../source";
import { Cell } from "../tokens/cell";
import { LABELS, MODES, mode, scales, type Mode, type ModeName } from "../tokens/modes";
import type { Place } from "../tokens/stream";
import { Texts, TurnTokens } from "../tokens/tokens";
import { isCut, type Run, type Trajectory } from "../types";

interface Props {
  source: Source;
  run: Run;
  /** Changes where a trajectory that was not there may have come. */
  news: string;
  route: Route;
}

export function TrajectoryPage({ source, run, news, route }: Props) {
  const asked = useRef({ key: "", start: 0 });
  const key = `${route.run}/${route.id}`;
  if (asked.current.key !== key) asked.current = { key, start: performance.now() };
  const { value, error, fresh } = useAnswer((signal) => source.trajectory(route.run, route.id, signal), key, news);
  useEffect(() => {
    if (!value || !fresh) return;
    mark("trajectory", asked.current.start, route.id);
  }, [value, fresh]);
  if (error) return <Missing what="trajectory" why={error} run={run} />;
  if (!value) return <p class="loading" role="status">Reading the trajectory.</p>;
  return <Shown key={value.key} source={source} route={route} trajectory={value} part={partOf(run)} />;
}

function readPlace(text: string | null): Place | null {
  const match = /^(\d+)\.(\d+)$/.exec(text ?? "");
  return match ? { turn: Number(match[1]), index: Number(match[2]) } : null;
}

function Shown({ source, route, trajectory, part }: { source: Source; route: Route; trajectory: Trajectory; part: string }) {
  const { run, id } = route;
  const texts = useMemo(() => new Texts(trajectory), [trajectory]);
  const turns = useMemo(
    () => new Map(trajectory.turns.map((turn) => [turn.index, new TurnTokens(turn, texts, (offset) => source.part(run, id, turn.index, offset))])),
    [trajectory],
  );
  const found = useMemo(() => scales(trajectory, [...turns.values()]), [trajectory]);
  const name = (MODES as readonly string[]).includes(route.params.get("color") ?? "") ? (route.params.get("color") as ModeName) : "outcome";
  const shownMode = useMemo(() => mode(name, trajectory, found), [name, found]);
  const missing = useMemo(() => new Map(MODES.map((each) => [each, mode(each, trajectory, found).missing])), [found]);
  const linked = useMemo(() => readPlace(route.params.get("token")), []);
  const hover = useMemo(() => new Cell<Place | null>(null), []);
  const chosen = useMemo(() => new Cell<Place | null>(linked), []);
  const choose = (place: Place | null) => {
    chosen.set(place);
    setParams({ token: place ? `${place.turn}.${place.index}` : null });
  };
  const load = async (path: string) => (await source.text(run, id, path)).text;
  const list = useMemo(() => scenes(trajectory.messages, trajectory.turns), [trajectory]);
  useEffect(() => {
    if (linked) requestAnimationFrame(() => document.getElementById(`token-${linked.turn}-${linked.index}`)?.scrollIntoView({ block: "center" })
      ?? document.getElementById(`turn-${linked.turn}`)?.scrollIntoView());
  }, []);
  const context = route.params.get("context") === "1" || (linked !== null && linked.index < (turns.get(linked.turn)?.numPrompt ?? 0));
  const showContext = () => setParams({ context: context ? null : "1" });
  const colourBy = (next: ModeName) => setParams({ color: next === "outcome" ? null : next });
  const back = new URLSearchParams(route.params);
  for (const own of ["color", "token", "context"]) back.delete(own);
  const step = (way: 1 | -1) => {
    const at = [...shownList.ids].find(([, each]) => each === trajectory.key)?.[0];
    const next = at === undefined || shownList.run !== run ? undefined : shownList.ids.get(at + way);
    if (next) go(link("trajectory", run, next, route.params), true);
  };
  useKeys({
    ...Object.fromEntries(MODES.map((each, i) => [String(i + 1), () => colourBy(each)])),
    "]": () => step(1), "[": () => step(-1), n: () => jump(1), p: () => jump(-1),
    c: showContext,
    b: () => document.querySelector(".turn.broken .break")?.scrollIntoView({ block: "center" }),
    g: () => go(link("group", run, trajectory.group_key)),
    Escape: () => { if (chosen.get()) choose(null); else go(link("trajectories", run, "", back)); },
  });

  return (
    <div class="trajectory">
      <div class="main-column">
        <nav class="crumbs" aria-label="Where">
          <a href={link("trajectories", run, "", back)}>Trajectories</a>
          <a href={link("group", run, trajectory.group_key)}>group <Text value={trajectory.group_id} /></a>
          <b><Text value={trajectory.trajectory_id} /></b>
        </nav>
        <Facts trajectory={trajectory} load={load} />
        <ColourChoice mode={shownMode} missing={missing} choose={colourBy} context={context} show={showContext} />
        <div class="turns">
          {list.map((scene, i) => (
            <TurnView
              key={i} trajectory={trajectory} scene={scene} tokens={scene.turn ? (turns.get(scene.turn.index) ?? null) : null}
              mode={shownMode} context={context} hover={hover} chosen={chosen} choose={choose} load={load} now={i < 3 || linked?.turn === scene.turn?.index}
            />
          ))}
          {trajectory.turns.length === 0 && <Empty title="No turns" why={trajectory.error ? "The episode failed before the model was asked." : "Nothing was sampled in this episode."} />}
          {trajectory.tokens_omitted > 0 && <p class="more">{plural(trajectory.tokens_omitted, "token")} beyond what is shown at once; long streams read them as you scroll.</p>}
          {!!trajectory.num_unrecorded_tokens && <p class="more">{plural(trajectory.num_unrecorded_tokens, "sampled token")} in no turn: {trajectory.unrecorded ?? "of a request that was lost"}.</p>}
        </div>
        <Beside trajectory={trajectory} source={source} run={run} />
      </div>
      <aside class="side-column">
        <div class="actions">
          <Copy label="Copy link" what={() => location.href} />
          <Copy label="Copy raw record" what={() => source.raw(run, id)} title="the record as verbatim export writes it" />
        </div>
        <Inspector trajectory={trajectory} turns={turns} hover={hover} chosen={chosen} />
        <Siblings source={source} run={run} trajectory={trajectory} params={route.params} part={part} />
        <TurnList trajectory={trajectory} turns={turns} />
        <p class="keys">1–7 colour · c context · n p turn · b break · [ ] list · g group</p>
      </aside>
    </div>
  );
}

/** What scrolls: the column, or on a narrow screen the whole view. */
function scroller(): Element | null {
  const column = document.querySelector(".main-column");
  return column && getComputedStyle(column).overflowY === "visible" ? document.getElementById("main") : column;
}

/** To the turn after the one that is at the top of the window, or before it. */
function jump(way: 1 | -1): void {
  const turns = [...document.querySelectorAll<HTMLElement>(".turn-head")];
  const top = 190;
  const now = turns.findLastIndex((turn) => turn.getBoundingClientRect().top <= top + 4);
  const next = turns[Math.max(0, Math.min(turns.length - 1, now + way))];
  const box = scroller();
  if (next && box) box.scrollBy({ top: next.getBoundingClientRect().top - top });
}

function Facts({ trajectory: t, load }: { trajectory: Trajectory; load: (path: string) => Promise<string> }) {
  const parts = [...Object.entries(t.reward_parts ?? {}), ...Object.entries(t.agent_rewards ?? {}).map(([name, value]) => [`agent ${name}`, value] as [string, number | null])];
  return (
    <>
      <dl class="facts">
        <div><dt>reward</dt><dd class="big">{t.reward === null ? <span class="none">not scored</span> : figure(t.reward)}</dd></div>
        {parts.map(([name, value]) => <div key={name} class="part"><dt><Text value={name} /></dt><dd>{figure(value)}</dd></div>)}
        <div><dt>advantage</dt><dd class="big">{t.advantage === null ? <span class="none">none</span> : signed(t.advantage)}</dd></div>
        <div><dt>outcome</dt><dd><RowOutcome row={t} /></dd></div>
        <div><dt>ended by</dt><dd><Text value={t.stop_reason ?? "–"} />{t.truncated && <span class="tag warn">cut</span>}</dd></div>
        <div><dt>turns</dt><dd>{count(t.num_turns)}</dd></div>
        <div><dt>tokens trained</dt><dd>{count(t.num_trained_tokens)} <span class="of">of {count(t.num_sampled_tokens)}</span></dd></div>
        <div><dt>breaks</dt><dd>{t.num_breaks ? <span class="tag warn">{t.num_breaks}</span> : "0"}</dd></div>
        <div><dt>environment</dt><dd class="id"><Text value={t.env} /></dd></div>
        <div><dt>example</dt><dd class="id"><Text value={t.example_id} title={t.example_id ?? ""} /></dd></div>
        <div><dt>step</dt><dd>{count(t.step)}{t.kind === "eval" && t.reason !== "evaluation" && <> <span class="tag">evaluation</span></>}</dd></div>
        {t.flags.length > 0 && <div><dt>flagged by</dt><dd>{t.flags.map((flag) => <span key={flag} class="tag"><Text value={flag} /></span>)}</dd></div>}
      </dl>
      {t.problems?.map((problem) => <div key={problem} class="error-note" role="note"><Text value={problem} /></div>)}
      {t.error && <div class="error-note" role="note"><b>Error</b> <LongText value={t.error} load={load} /></div>}
    </>
  );
}

interface ColourProps {
  mode: Mode;
  /** Why there is nothing to colour by; null where there is. */
  missing: Map<ModeName, string | null>;
  choose: (name: ModeName) => void;
  context: boolean;
  show: () => void;
}

function ColourChoice({ mode: shown, missing, choose, context, show }: ColourProps) {
  return (
    <div class="colours">
      <div class="segments" role="radiogroup" aria-label="Colour of the tokens">
        <span class="label">colour</span>
        {MODES.map((name, i) => (
          <button key={name} type="button" role="radio" aria-checked={shown.name === name} class={missing.get(name) ? "nothing" : ""} title={missing.get(name) ?? `key ${i + 1}`} onClick={() => choose(name)}>{LABELS[name]}</button>
        ))}
        <button type="button" class="apart" aria-pressed={context} title="key c: the tokens that are new in each prompt" onClick={show}>context</button>
      </div>
      <ul class="token-legend" aria-label={`Legend: ${shown.label}`}>
        {shown.missing && <li class="why">{shown.missing}</li>}
        {shown.legend.map(({ colour, label, about }) => <li key={label} title={about}><span class={`t ${colour}`}>{label}</span></li>)}
      </ul>
    </div>
  );
}

function TurnList({ trajectory, turns }: { trajectory: Trajectory; turns: Map<number, TurnTokens> }) {
  if (trajectory.turns.length < 2) return null;
  const show = (index: number) => (event: Event) => {
    event.preventDefault(); // the fragment names the view
    const box = scroller();
    const head = document.querySelector(`#turn-${index} .turn-head`);
    if (box && head) box.scrollBy({ top: head.getBoundingClientRect().top - 190 });
  };
  return (
    <section class="turn-list">
      <h2>Turns</h2>
      <ol>
        {trajectory.turns.map((turn) => (
          <li key={turn.index}>
            <a href={`#turn-${turn.index}`} onClick={show(turn.index)}>
              <b>{turn.index}</b>
              <span class="bar"><i class={`f${outcomeColour(turn.outcome)}`} style={{ width: `${Math.max(3, (100 * (turns.get(turn.index)?.numSampled ?? 0)) / longest(turns))}%` }} /></span>
              <span class="amount">{count(turns.get(turn.index)?.numSampled ?? 0)}</span>
              {turn.agent !== "main" && <Text class="agent" value={turn.agent} />}
              {turn.break && <span class="tag warn">break</span>}
            </a>
          </li>
        ))}
      </ol>
    </section>
  );
}

function longest(turns: Map<number, TurnTokens>): number {
  let most = 1;
  for (const { numSampled } of turns.values()) most = Math.max(most, numSampled);
  return most;
}

function Beside({ trajectory, source, run }: { trajectory: Trajectory; source: Source; run: number }) {
  const [raw, setRaw] = useState<string | null>(null);
  const opened = (event: Event) => {
    if (raw !== null || !(event.currentTarget as HTMLDetailsElement).open) return;
    source.raw(run, trajectory.key).then(setRaw, (error: unknown) => setRaw(String(error)));
  };
  const has = (value: unknown) => isCut(value) || (Array.isArray(value) ? value.length > 0 : value !== null && typeof value === "object" && Object.keys(value).length > 0);
  const load = async (path: string) => (await source.text(run, trajectory.key, path)).text;
  const shown = (value: unknown) => <LongText value={isCut(value) ? value : json(value)} load={load} />;
  return (
    <section class="documents">
      {has(trajectory.tools) && <details><summary>Tools that were offered</summary><div class="code">{shown(trajectory.tools)}</div></details>}
      {has(trajectory.info) && <details><summary>What the environment kept (info)</summary><div class="code">{shown(trajectory.info)}</div></details>}
      <details onToggle={opened}>
        <summary>Raw record</summary>
        <div class="code">{raw === null ? "Reading." : <><p class="of">{bytes(raw.length)}</p><LongText value={raw} /></>}</div>
      </details>
    </section>
  );
}
