"""Faults to plant between the sampler and the trainer: in records, samples, and the ledger with its staleness."""

from __future__ import annotations

from planted_copy import Fault

_TYPES = ("core/test_types.py",)
_TREE = ("core/test_token_tree.py",)
RECORDS = (
    Fault(
        name="a logprob that is NaN becomes 0",
        file="core/records/turn.py",
        old="    bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_POSITIVE_LOGPROB))\n",
        new="    logprobs = np.nan_to_num(logprobs)\n    bad = np.flatnonzero(logprobs > MAX_POSITIVE_LOGPROB)\n",
        harm="A token whose logprob the sampler lost is trained as one of probability 1.",
        tests=_TYPES,
    ),
    Fault(
        name="a logprob well above 0 is taken for rounding",
        file="core/records/turn.py",
        old="MAX_POSITIVE_LOGPROB = 1e-4\n",
        new="MAX_POSITIVE_LOGPROB = 1e-1\n",
        harm="A sampler that returns something else than logprobs is trained on.",
        tests=_TYPES,
    ),
    Fault(
        name="a turn extends one that ends inside of its own completion",
        file="core/records/turn.py",
        old="        return before.length <= path.length - len(self.completion_ids) and path.starts_with(before)\n",
        new="        return before.length <= path.length and path.starts_with(before)\n",
        harm="Two answers to one prompt, of which one begins as the other, are trained as one conversation.",
        tests=_TYPES,
    ),
    Fault(
        name="the first id beyond the vocabulary is taken",
        file="core/token_tree.py",
        old="            if not 0 <= ids.item(ids.view(_UINT32).argmax()) < self._vocab_size:\n",
        new="            if not 0 <= ids.item(ids.view(_UINT32).argmax()) <= self._vocab_size:\n",
        harm="An id without an embedding reaches the trainer, which stops with an index error hours later.",
        tests=_TREE,
    ),
    Fault(
        name="a longer sequence is read from a shorter one",
        file="core/token_tree.py",
        old="            if known is not None and end <= known[0]:\n",
        new="            if known is not None:\n",
        harm="A sample of a conversation with breaks lacks tokens in its middle.",
        tests=_TREE,
    ),
    Fault(
        name="turns that are not trained are labels",
        file="core/trajectories/trajectory.py",
        old="            if turn.logprobs is None or not turn.trained:\n",
        new="            if turn.logprobs is None:\n",
        harm="Who trains on a rollout's `labels` trains an opponent's or a judge's words.",
        tests=("core/trajectories/test_interleaved.py",),
    ),
)

_SAMPLES = ("core/trajectories/test_edge_cases.py",)
_SPANS = ("core/trajectories/test_spans.py",)
SAMPLES = (
    Fault(
        name="of the samples that a prompt extends the first wins",
        file="core/trajectories/extension.py",
        old="                    if longest < end <= length or (end == longest and candidate < number):\n",
        new="                    if end <= length and not longest:\n",
        harm="Tokens that a longer sample was sampled with become context that nobody trains, or are trained twice.",
        tests=_SAMPLES,
    ),
    Fault(
        name="an advantage of 0 inherits the trajectory's",
        file="core/trajectories/samples.py",
        old="turn.advantage if turn.advantage is not None else trajectory.advantage)\n",
        new="turn.advantage or trajectory.advantage)\n",
        harm="A turn whose credit is exactly 0 is pushed by the credit of the whole episode.",
        tests=_SAMPLES,
    ),
    Fault(
        name="all tokens of a turn have the version of its first",
        file="core/trajectories/samples.py",
        old="        version = versions.item(first)\n",
        new="        version = versions.item(0)\n",
        harm="Tokens that new weights sampled in the middle of a turn count as stale.",
        tests=_SAMPLES,
    ),
    Fault(
        name="a turn of two versions loses its temperature",
        file="core/trajectories/samples.py",
        old="index, version, advantage, turn.temperature, own)))\n",
        new="index, version, advantage, 1.0, own)))\n",
        harm="Turns during which weights changed are trained at another temperature than they were sampled at.",
        tests=_SAMPLES,
    ),
    Fault(
        name="chunks are numbered by their place in the sample",
        file="core/trajectories/samples.py",
        old="    for index, turn in trained:\n        _add_spans(",
        new="    for index, (_, turn) in enumerate(trained):\n        _add_spans(",
        harm="Losses on turns, and what is shown of a turn, are of another turn wherever one is left out.",
        tests=_SAMPLES,
    ),
    Fault(
        name="the mask is one token early",
        file="core/records/spans.py",
        old="        return np.arange(spans[0].start, spans[0].end, dtype=np.int64)\n",
        new="        return np.arange(spans[0].start - 1, spans[0].end - 1, dtype=np.int64)\n",
        harm="The last token of the prompt is trained and the stop token is not: answers never end.",
        tests=_SPANS,
    ),
    Fault(
        name="the stop token is outside of the mask",
        file="core/records/spans.py",
        old="            array[span[0] : span[1]] = value\n",
        new='            array[span[0] : span[1] - (name == "loss_mask")] = value\n',
        harm="Whoever reads `loss_mask` leaves the stop token untrained.",
        tests=_SPANS,
    ),
    Fault(
        name="a missing logprob is 0 in a list of trained tokens",
        file="core/records/spans.py",
        old="np.full(span.end - span.start, outside, dtype) if span.logprobs is None",
        new="np.full(span.end - span.start, 0.0, dtype) if span.logprobs is None",
        harm="A token without a logprob passes for one of probability 1.",
        tests=_SPANS,
    ),
    Fault(
        name="a turn that fills the sample to the last token is too long",
        file="core/trajectories/samples.py",
        old="    if turn.path.length > longest:\n",
        new="    if turn.path.length >= longest:\n",
        harm="Episodes that use all of the context they were given are never trained.",
        tests=_SAMPLES,
    ),
    Fault(
        name="a turn without logprobs is trained",
        file="core/trajectories/samples.py",
        old='    return TRAINED if turn.logprobs is not None or not needs_logprobs else "missing_logprobs"\n',
        new="    return TRAINED\n",
        harm="Tokens whose sampling probability nobody knows get an importance ratio.",
        tests=_SAMPLES,
    ),
    Fault(
        name="recorded experts are one token late",
        file="core/trajectories/samples.py",
        old="            start = turn.path.length - 1 - len(experts)\n",
        new="            start = turn.path.length - len(experts)\n",
        harm="The trainer of a mixture sends each token through the experts of its neighbour.",
        tests=("trainer/test_router_replay.py",),
    ),
)

_LEDGER = ("core/trajectories/test_ledger.py",)
_OUTCOMES = ("core/trajectories/test_outcome.py",)
_STALENESS = ("run/orchestrator/test_staleness.py",)
_RECORDER = ("rollouts/test_recorder.py",)
_LOOP = ("run/orchestrator/test_loop.py", "run/orchestrator/test_ledger_reasons.py")
LEDGER = (
    Fault(
        name="lost tokens are no reason to stop",
        file="core/trajectories/ledger.py",
        old="        assert self.sampled == total, (\n",
        new="        assert self.sampled >= total, (\n",
        harm="A run that loses tokens goes on and says nothing.",
        tests=_LEDGER,
    ),
    Fault(
        name="a group that was settled long ago may be settled again",
        file="core/trajectories/ledger.py",
        old="        return index < self._settled_below or index in self._settled_above\n",
        new="        return index in self._settled_above\n",
        harm="A group that comes twice is trained twice.",
        tests=_LEDGER,
    ),
    Fault(
        name="a state forgets the groups that were settled out of order",
        file="core/trajectories/ledger.py",
        old='state["settled_below"], set(state["settled_above"])\n',
        new='state["settled_below"], set()\n',
        harm="After a resume, a group that ended before an earlier one can be trained twice.",
        tests=_LEDGER,
    ),
    Fault(
        name="cut off tokens are not counted beside a dropped turn",
        file="core/trajectories/outcome.py",
        old="found[self.unrecorded] = found.get(self.unrecorded, 0) + self.trajectory.num_unrecorded_tokens\n",
        new="found.setdefault(self.unrecorded, self.trajectory.num_unrecorded_tokens)\n",
        harm="A run with a cut off completion stops at a ledger that does not add up.",
        tests=_OUTCOMES,
    ),
    Fault(
        name="finished groups are pending twice",
        file="run/orchestrator/dispatcher.py",
        old="        return [*self._drawn, *self._running.values(), *self._ready, *ended]\n",
        new="        return [*self._drawn, *self._running.values(), *self._ready, *self._ready, *ended]\n",
        harm="A run with groups left over stops at a ledger that does not add up.",
        tests=_LOOP,
    ),
    Fault(
        name="failed tokens of a stale group are counted twice",
        file="run/orchestrator/dispatcher.py",
        old='            dropped = {"stale": run.num_sampled_tokens - failed, "error": failed}\n',
        new='            dropped = {"stale": run.num_sampled_tokens, "error": failed}\n',
        harm="A run in which a group fails in part and becomes stale stops at a ledger that does not add up.",
        tests=("run/orchestrator/test_dispatcher_search.py",),
    ),
    Fault(
        name="what is sampled after the end of an episode is sampled and not dropped",
        file="rollouts/recorder.py",
        old='            self._on_dropped({"error": num_tokens})\n',
        new='            self._on_dropped({"error": 0})\n',
        harm="An agent that asks once more after its end stops the whole run.",
        tests=_RECORDER,
    ),
    Fault(
        name="masked tokens are those of the last step",
        file="run/orchestrator/loop.py",
        old="        self.ledger.masked_by_loss += int(",
        new="        self.ledger.masked_by_loss = int(",
        harm="`ledger/masked_by_loss` says of a run that masks half of its tokens that it masks almost none.",
        tests=("run/orchestrator/test_masked_tokens.py",),
    ),
    Fault(
        name="the oldest age that may be trained is too old",
        file="run/orchestrator/assemble.py",
        old="            if age(trajectory, step) > rules.max_off_policy_steps:\n",
        new="            if age(trajectory, step) >= rules.max_off_policy_steps:\n",
        harm="Rollouts that the configuration allows are dropped, all of them in a synchronous run.",
        tests=_LOOP,
    ),
    Fault(
        name="a group of the oldest age that may be trained is too old",
        file="run/orchestrator/staleness.py",
        old="    return bool(completed) and all(age(trajectory, batch) > max_off_policy_steps for",
        new="    return bool(completed) and all(age(trajectory, batch) >= max_off_policy_steps for",
        harm="Groups that were left over for the next batch are dropped there although they may be trained.",
        tests=_STALENESS,
    ),
    Fault(
        name="rollouts may start for one batch more",
        file="run/orchestrator/staleness.py",
        old="    return version + max_async_level\n",
        new="    return version + max_async_level + 1\n",
        harm="A synchronous run is not: half of its rollouts are of the weights before.",
        tests=_STALENESS,
    ),
    Fault(
        name="the age counts from the newest agent",
        file="core/trajectories/age.py",
        old="    return min((version for",
        new="    return max((version for",
        harm="Tokens older than max_off_policy_steps are trained where several agents speak.",
        tests=_STALENESS,
    ),
)
