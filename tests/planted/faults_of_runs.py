"""Faults to plant in the work of a run: weight sync, the gateway's threads, resuming."""

from __future__ import annotations

from planted_copy import Fault

_CANARY = ("trainer/transport/test_canary.py",)
_SYNC = ("run/orchestrator/test_weight_sync.py",)
_FILES = ("trainer/transport/test_weight_folders.py", "trainer/transport/test_published_files.py")
_WORKER = ("trainer/test_worker.py",)
WEIGHT_SYNC = (
    Fault(
        name="the canary compares a version with itself",
        file="run/orchestrator/weight_sync.py",
        old="        canary = Canary(report.probes, before=self._probes, tolerance=self._allowed, cuts=self._cuts)\n",
        new="        canary = Canary(report.probes, before=report.probes, tolerance=self._allowed, cuts=self._cuts)\n",
        harm="A sampler that kept all of its old weights is not found out while the steps are small.",
        tests=_SYNC,
    ),
    Fault(
        name="the canary compares the trainer with the trainer",
        file="trainer/transport/canary.py",
        old="    difference = mean_difference(published, found)\n",
        new="    difference = mean_difference(published, published.logprobs)\n",
        harm="The canary finds nothing.",
        tests=_CANARY,
    ),
    Fault(
        name="logprobs that are NaN pass the canary",
        file="trainer/transport/canary.py",
        old="    if not difference <= tolerance:  # NaN is a mismatch too\n",
        new="    if difference > tolerance:\n",
        harm="A sampler with broken weights samples on.",
        tests=_CANARY,
    ),
    Fault(
        name="a sampler without replicas is not asked after an update",
        file="run/orchestrator/weight_sync.py",
        old="        assert report.version == self._sampler.policy_version\n        await self._check(canary)\n",
        new="        assert report.version == self._sampler.policy_version\n",
        harm="Stale weights after a successful update are noticed by no one.",
        tests=_SYNC,
    ),
    Fault(
        name="the prefix cache is not filled before the update",
        file="run/orchestrator/weight_sync.py",
        old="            await sampler.cached_logprob(cached_prefixes(self._published)[-1])\n",
        new="            cached_prefixes(self._published)\n",
        harm="A cache that outlives its weights is not seen by the canary.",
        tests=_SYNC,
    ),
    Fault(
        name="weights have their name while they are written",
        file="trainer/transport/weights.py",
        old="        os.rename(partial, target)\n",
        new="        shutil.copytree(partial, target)\n        shutil.rmtree(partial)\n",
        harm="A sampler loads half of a version.",
        tests=_FILES,
    ),
    Fault(
        name="a file has its name while it is written",
        file="trainer/transport/files.py",
        old="    with replacing(path, lasting=False) as temporary:\n",
        new="    with replacing(path, temporary=path, lasting=False) as temporary:\n",
        harm="The other process reads half of a message.",
        tests=_FILES,
    ),
    Fault(
        name="the version that the sampler reads is removed",
        file="trainer/transport/weights.py",
        old="number <= version - self._keep:\n",
        new="number <= version - self._keep + 1:\n",
        harm="A sampler that is one version behind finds no files.",
        tests=_FILES,
    ),
    Fault(
        name="weights are published before they are trained",
        file="trainer/worker.py",
        old="            metrics = self.trainer.train_batch(samples, tokens.append if self.keeps_tokens else None)\n"
        "            folder = self.weights.publish(version, self.trainer.save_weights)\n",
        new="            folder = self.weights.publish(version, self.trainer.save_weights)\n"
        "            metrics = self.trainer.train_batch(samples, tokens.append if self.keeps_tokens else None)\n",
        harm="The sampler is one step behind for ever, and no age says so.",
        tests=_WORKER,
    ),
    Fault(
        name="the engine's prefixes outlive their weights",
        file="inference/embedded/slots.py",
        old="self.rebuild_until, self.computed), 0)\n        self.computed[:] = 0\n",
        new="self.rebuild_until, self.computed), 0)\n        self.computed[self.active] = 0\n",
        harm="A conversation goes on over keys and values of weights before.",
        tests=("inference/test_slots.py", "inference/test_rebuild.py"),
    ),
    Fault(
        name="tokens in flight keep the version that their sequence began with",
        file="inference/embedded/slots.py",
        old="        self.versions[slots, at] = version\n",
        new="        self.versions[slots, at] = np.where(at > self.prompt_length[slots], self.versions[slots, at - 1], "
        "version)\n",
        harm="What new weights sampled in the middle of a turn counts as sampled by the old ones.",
        tests=("inference/test_slots.py", "inference/test_rebuild.py"),
    ),
)

_ATTACKS = "rollouts/gateway/test_gateway_attacks.py"
LIMITS = (
    Fault(
        name="what a client asks wrongly is a failure of the gateway",
        file="rollouts/gateway/wire.py",
        old="        return Refused(400, cut(str(error), _LONGEST_MESSAGE))\n",
        new="        return Refused(500, cut(str(error), _LONGEST_MESSAGE))\n",
        harm="A client asks again and again for what can never be answered.",
        tests=("rollouts/gateway/test_hostile_gateway.py",),
    ),
    Fault(
        name="a door has no end of places",
        file="inference/http/acceptor.py",
        old="len(self._queue) >= door.most and",
        new="len(self._queue) >= 10**9 and",
        harm="One program takes all connections of its gateway.",
        tests=(f"{_ATTACKS}::test_a_program_in_its_sandbox_has_its_own_places_and_the_oldest_go",),
    ),
    Fault(
        name="a body of brackets is parsed",
        file="inference/http/json_text.py",
        old="    check_json_size(text, most_values=most_values)\n",
        new="",
        harm="A request of some megabytes stops the run.",
        tests=(f"{_ATTACKS}::test_a_body_of_too_many_values_is_refused_before_it_is_parsed",),
    ),
    Fault(
        name="bodies are not counted for their session",
        file="rollouts/gateway/budget.py",
        old="            self._of[owner] += more\n",
        new="            self._of[owner] += 0\n",
        harm="One session fills the memory with bodies.",
        tests=(f"{_ATTACKS}::test_where_all_bytes_are_taken_others_wait_and_are_told_so",),
    ),
)

_MATCHING = ("rollouts/gateway/test_matching.py",)
_GATEWAY = ("rollouts/gateway/test_gateway.py",)
GATEWAY = (
    Fault(
        name="a request continues the first answer that it has, not the last",
        file="rollouts/gateway/threads.py",
        old="            if other.turn is not None:\n                walk.known = other\n",
        new="            if other.turn is not None and walk.known is None:\n                walk.known = other\n",
        harm="All turns of a conversation after the second begin a sample of their own.",
        tests=_MATCHING,
    ),
    Fault(
        name="a request that was refused stays open",
        file="rollouts/gateway/threads.py",
        old="            match.known.num_open -= 1\n",
        new="            match.known.num_open -= answered\n",
        harm="After a failed request, all that follow it are branches and named parallel calls.",
        tests=_MATCHING,
    ),
    Fault(
        name="a request with other tools continues the old prompt",
        file="rollouts/gateway/threads.py",
        old="bridges=known is not None and known.tools == shown,",
        new="bridges=known is not None,",
        harm="A client adds a tool, and the model is never shown it.",
        tests=_MATCHING,
    ),
    Fault(
        name="an answer without its reasoning is taken for the whole answer",
        file="rollouts/gateway/canonical.py",
        old='        return MessageDigest(digest_of([*parts, "reasoning", reasoning]) if reasoning else bare, bare)\n',
        new="        return MessageDigest(bare, bare)\n",
        harm="A client that strips thinking is answered as if it had sent it.",
        tests=_MATCHING,
    ),
    Fault(
        name="the speaker of a message does not count",
        file="rollouts/gateway/canonical.py",
        old='            parts.append(str(message.get("name") or ""))\n',
        new='            parts.append("")\n',
        harm="A question of Bob continues the conversation with Alice, under her name.",
        tests=_MATCHING,
    ),
    Fault(
        name="of two equal answers the oldest is continued",
        file="rollouts/gateway/threads.py",
        old="        if node.turn is None or not (node.num_open or node.num_continued):\n",
        new="        if node.turn is None:\n",
        harm="A conversation goes on after a turn that its client has thrown away.",
        tests=_MATCHING,
    ),
    Fault(
        name="the calls of an answer do not count",
        file="rollouts/gateway/canonical.py",
        old='            parts += [str(call["function"].get("name") or ""), '
        'canonical_arguments(call["function"].get("arguments"))]\n',
        new='            parts += [str(call["function"].get("name") or "")]\n',
        harm="An edited call is taken for the one that was sampled.",
        tests=_MATCHING,
    ),
    Fault(
        name="a retry is recorded twice",
        file="rollouts/gateway/exchanges.py",
        old="            found = await self._retried(digest) if is_retry else self._left(digest)\n",
        new="            found = self._left(digest)\n",
        harm="A client that retries a slow request pays twice, and both answers are trained.",
        tests=_GATEWAY,
    ),
    Fault(
        name="a retry repeats the failure",
        file="rollouts/gateway/exchanges.py",
        old="        return not self.task.cancelled() and self.task.exception() is None\n",
        new="        return not self.task.cancelled()\n",
        harm="A request that failed once fails for ever.",
        tests=_GATEWAY,
    ),
    Fault(
        name="greedy turns are trained",
        file="rollouts/gateway/session.py",
        old="trained=trained and params.temperature > 0)\n",
        new="trained=trained)\n",
        harm="Turns at temperature 0, whose sampling probability is 1, are trained as samples.",
        tests=_GATEWAY,
    ),
)

_SCHEDULE = ("algorithms/curriculum",)
_STATE = ("trainer/test_trainer_resume.py",)
_STORE = ("logs/checkpoints/test_store.py",)
_DISPATCH = (
    "run/orchestrator/test_dispatcher.py",
    "run/orchestrator/test_loop.py",
    "run/orchestrator/test_ledger_reasons.py",
)
RESUME = (
    Fault(
        name="a resumed run draws by new random numbers",
        file="algorithms/curriculum/schedule.py",
        old='        self._rng.bit_generator.state = dict(state["rng"])\n',
        new='        dict(state["rng"])\n',
        harm="A resumed run is another run.",
        tests=_SCHEDULE,
    ),
    Fault(
        name="a resumed run begins its pass again",
        file="algorithms/curriculum/schedule.py",
        old='{env: [i for i in state["pass"].get(env, []) if i in rows] for',
        new="{env: [] for",
        harm="Runs that are often resumed train some examples again and again, and others never.",
        tests=_SCHEDULE,
    ),
    Fault(
        name="the window of rewards grows after a resume",
        file="algorithms/curriculum/pools.py",
        old="                i: deque(values, maxlen=self._rules.window)\n",
        new="                i: deque(values)\n",
        harm="After a resume an example that has become easy stays in rotation.",
        tests=_SCHEDULE,
    ),
    Fault(
        name="the optimizer's moments are forgotten",
        file="trainer/optimizer_state.py",
        old="    optimizer.state.update(state)\n",
        new="    assert state is not None\n",
        harm="The first steps after a resume are far too large.",
        tests=_STATE,
    ),
    Fault(
        name="the schedule begins again",
        file="trainer/schedule.py",
        old="        self.total, self.num_done, self._last_lr = total, before.num_optimizer_steps, before.last_lr\n",
        new="        self.total, self._last_lr = total, before.last_lr\n",
        harm="A resumed run warms up again.",
        tests=_STATE,
    ),
    Fault(
        name="groups in flight are not run again",
        file="run/orchestrator/dispatcher.py",
        old='[self.schedule.lookup(h["env"], h["example_id"], h["index"]) for h in state["held"]]\n',
        new="[]\n",
        harm="Each resume skips the examples that were in flight: the long ones most of all.",
        tests=_DISPATCH,
    ),
    Fault(
        name="groups that wait to be run again are forgotten by the next stop",
        file="run/orchestrator/dispatcher.py",
        old="        held = [*self._again, *(launched.drawn for launched in self._held())]\n",
        new="        held = [launched.drawn for launched in self._held()]\n",
        harm="Two stops, one soon after the other, skip examples.",
        tests=_DISPATCH,
    ),
    Fault(
        name="tokens in flight at the stop are not dropped",
        file="run/orchestrator/loop.py",
        old='        self.ledger.drop({"cancelled": state["pending_tokens"]})\n        self.ledger.check(pending=0)\n',
        new="",
        harm="A resumed run stops at a ledger that does not add up.",
        tests=_DISPATCH,
    ),
    Fault(
        name="a changed file of the same size is not damage",
        file="logs/checkpoints/manifest.py",
        old="            if sha256(path) != expected:\n",
        new="            if not sha256(path):\n",
        harm="A run is resumed from weights that the disk has spoiled.",
        tests=_STORE,
    ),
    Fault(
        name="the newest checkpoint is taken as it is",
        file="logs/checkpoints/store.py",
        old="            damage = find_damage(folder) or _other_step(folder, step)\n",
        new="            damage = _other_step(folder, step)\n",
        harm="A run is resumed from a checkpoint that lacks files, though the one before is whole.",
        tests=_STORE,
    ),
    Fault(
        name="a checkpoint is there before it is sealed",
        file="logs/checkpoints/store.py",
        old='        temporary = self.folder / f"{_WRITING}{name}"\n        final = self.folder / name\n        try:\n',
        new='        temporary = self.folder / f"{name}"\n        final = self.folder / name\n        try:\n',
        harm="A killed write is taken for a checkpoint.",
        tests=_STORE,
    ),
)
