/** What is known of the token under the pointer, or else of the chosen one. */
import { useEffect, useState } from "preact/hooks";
import { count, figure, signed } from "../format";
import { OUTCOME_MEANS, TrajectoryOutcome } from "./outcome";
import { Text } from "./text";
import { useCell, type Cell } from "../tokens/cell";
import { advantageOf, outcomeOfToken } from "../tokens/modes";
import type { Place } from "../tokens/stream";
import type { TurnTokens } from "../tokens/tokens";
import type { Trajectory } from "../types";

interface Props {
  trajectory: Trajectory;
  turns: Map<number, TurnTokens>;
  hover: Cell<Place | null>;
  chosen: Cell<Place | null>;
}

export function Inspector({ trajectory, turns, hover, chosen }: Props) {
  const [over, kept] = [useCell(hover), useCell(chosen)];
  const place = over ?? kept;
  const tokens = place && turns.get(place.turn);
  const token = tokens?.at(place?.index ?? 0);
  const [, again] = useState(0);
  useEffect(() => {
    // Of a long stream the token's part may still have to be read; where that fails, the stream says why.
    if (place && tokens && !token) tokens.load(place.index).then(() => again((n) => n + 1), () => undefined);
  }, [place, tokens, token === null]);
  if (!place || !tokens || !token) {
    return <section class="inspector"><h2>Token</h2><p class="hint">Point at a token, or press Tab to reach a stream and the arrow keys to walk along it.</p></section>;
  }
  const outcome = outcomeOfToken(token, tokens);
  const { logprob, trainer, teacher, gradient, version, drawnAmong } = token;
  const difference = logprob !== null && trainer !== null ? trainer - logprob : null;
  const advantage = token.sampled ? advantageOf(trajectory, tokens) : null;
  return (
    <section class="inspector" aria-live={over ? "off" : "polite"}>
      <h2>Token <b>{token.id}</b></h2>
      <p class="token-text">{token.kind === "unknown" ? missing("the tokenizer has no text for it") : <Text value={token.kind === "bytes" ? token.text : JSON.stringify(token.text)} />}{token.kind === "bytes" && <span class="of"> bytes, no whole character</span>}{token.kind === "special" && <span class="of"> control token</span>}</p>
      <dl>
        <dt>place</dt><dd>{token.position} <span class="of">in the context of turn {place.turn}, {token.sampled ? `sampled token ${token.index - tokens.numPrompt}` : "in its prompt"}</span></dd>
        <dt>outcome</dt><dd>{outcome === "context" ? "context" : outcome === "masked" ? <><span class="outcome fm">trained, no gradient</span></> : <TrajectoryOutcome outcome={outcome} />}
          <span class="of means">{outcome === "context" ? "given to the model, not sampled in this turn" : outcome === "masked" ? "masked by the loss, or an advantage of 0" : OUTCOME_MEANS[outcome] ?? "dropped by this filter"}</span></dd>
        {token.sampled && (
          <>
            <dt>sampler</dt><dd>{logprob === null ? missing("the sampler gave none") : <>{figure(logprob)} <span class="of">probability {figure(Math.exp(logprob))}</span></>}</dd>
            <dt>trainer</dt><dd>{trainer === null ? missing("not trained") : <>{figure(trainer)} <span class="of">probability {figure(Math.exp(trainer))}</span></>}</dd>
            <dt>difference</dt><dd>{difference === null ? missing() : <>{signed(difference)} <span class="of" title="importance ratio">ratio {figure(Math.exp(difference))}</span></>}</dd>
            <dt>advantage</dt><dd>{advantage === null ? missing() : signed(advantage)}</dd>
            <dt>gradient</dt><dd>{gradient === null ? missing("not trained") : signed(gradient)}</dd>
            <dt>teacher</dt><dd>{teacher === null ? missing("none") : <>{figure(teacher)} <span class="of">{logprob === null ? "" : `${signed(teacher - logprob)} to the sampler`}</span></>}</dd>
            <dt>version</dt><dd>{version === null ? missing("unknown") : version}</dd>
            {drawnAmong !== null && <><dt>drawn among</dt><dd>{drawnAmong === 0 ? "the whole vocabulary" : <>{count(drawnAmong)} <span class="of">{drawnAmong === 1 ? "id" : "ids"} that top_p, top_k and min_p kept</span></>}</dd></>}
          </>
        )}
      </dl>
    </section>
  );
}

function missing(why = "–") {
  return <span class="none">{why}</span>;
}
