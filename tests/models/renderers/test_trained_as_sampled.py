"""Turns that the template would write otherwise are trained in the context that they were sampled in: against every
outcome of a small policy, and against the sampler's own logprobs."""

import asyncio
import itertools

import numpy as np
import pytest
import torch
from families import family_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from verbatim import Example, Group, RolloutIdentity, Trajectory, Turn, build_samples
from verbatim.algorithms.credit import ADVANTAGES, assign_advantages
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.environments.environment import Episode, Reply
from verbatim.inference import SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.renderers import Conversation, create_renderer
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode
from verbatim.trainer.trainer import Trainer

ASK = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "so?"}
FORMS = (
    "<think>\n\n</think>\n\na<|im_end|>",  # the template leaves out the block
    "<think>\n\n</think>\n\nb<|im_end|>",
    "  a \n<|im_end|>",  # and the white space
    "<think>\nc\n</think>\n\na<|im_end|>",  # and, where the user speaks, the thought
)
"""What the policy may say in each of its two turns."""
WAYS = ({}, {"thinking_retention": "all"}, {"history": "template"})


class EveryOutcome:
    """A policy that says one of `FORMS`, twice. Its parameters: a number for each next token after each context, which
    is all ids before it."""

    def __init__(self, way):
        tokenizer = family_tokenizer("qwen3")
        self.forms = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in FORMS]
        self.renderer = create_renderer("qwen3", tokenizer, **way)
        self.places, self.paths = {}, []
        for said in itertools.product(range(len(FORMS)), repeat=2):
            conversation, turns = Conversation.open(self.renderer, [ASK]), []
            for form in said:
                prompt = tuple(conversation.prompt_ids.tolist())
                turns.append((prompt, self.forms[form]))
                self._know(prompt)
                conversation = conversation.answered(np.array(self.forms[form], np.int32)).continued([MORE])
            self.paths.append(turns)
        rng = np.random.default_rng(0)
        self.rewards = rng.normal(size=len(self.paths)).tolist()
        self.theta = torch.tensor(rng.normal(size=len(self.places)), requires_grad=True)

    def _know(self, prompt):
        for form in self.forms:
            for end in range(len(form)):
                self.places.setdefault((prompt + form[:end], form[end]), len(self.places))

    def logprob(self, before, token):
        """Of a token after these ids; a KeyError where the policy was never asked after them."""
        choices = sorted({form for context, form in self.places if context == before})
        row = torch.stack([self.theta[self.places[before, choice]] for choice in choices])
        return row.log_softmax(0)[choices.index(token)]

    def logprobs(self, turns):
        return [[self.logprob(prompt + said[:end], said[end]) for end in range(len(said))] for prompt, said in turns]


@pytest.mark.parametrize("way", WAYS, ids=["tool_cycle", "all", "template"])
def test_the_gradient_over_every_outcome_is_that_of_the_expected_reward(way):
    policy = EveryOutcome(way)
    logprobs = [policy.logprobs(turns) for turns in policy.paths]
    chances = [torch.stack([each for turn in path for each in turn]).sum().exp() for path in logprobs]
    assert sum(chance.item() for chance in chances) == pytest.approx(1.0, abs=1e-12)
    expected = sum(chance * reward for chance, reward in zip(chances, policy.rewards, strict=True))
    (exact,) = torch.autograd.grad(expected, policy.theta, retain_graph=True)
    records = [
        Trajectory(
            example_id="x",
            reward=reward,
            turns=[
                Turn(prompt_ids=prompt, completion_ids=said, logprobs=[each.item() for each in known])
                for (prompt, said), known in zip(turns, path, strict=True)
            ],
        )
        for turns, path, reward in zip(policy.paths, logprobs, policy.rewards, strict=True)
    ]
    # What each record is trained on: each token after what stands before it in its sample.
    trained = [
        sum(
            policy.logprob(tuple(sample.token_ids[:place].tolist()), int(sample.token_ids[place]))
            for sample in build_samples(record)
            for place in np.flatnonzero(sample.loss_mask).tolist()
        )
        for record in records
    ]
    total = 0.0
    for i, j in itertools.product(range(len(records)), repeat=2):
        group = Group(group_id="g", example_id="x", env="e", trajectories=(records[i], records[j]))
        advantage = assign_advantages(group, ADVANTAGES["rloo"]).trajectories[0].advantage
        total = total + (chances[i] * chances[j]).detach() * advantage * trained[i]
    (found,) = torch.autograd.grad(total, policy.theta)
    assert exact.norm() > 0.1
    assert (found - exact).abs().max() < 1e-12
    num_samples = [len(build_samples(record)) for record in records]
    thinks = [turns[0][1] == policy.forms[3] for turns in policy.paths]
    keeps = {"tool_cycle": thinks, "all": [False] * 16, "template": [True] * 16}
    name = way.get("history", way.get("thinking_retention", "tool_cycle"))
    assert [number == 2 for number in num_samples] == keeps[name]


class Chat(Episode):
    """A user who asks on, five times."""

    def __init__(self):
        self.messages, self.left = [ASK], 5

    async def reply(self, message):
        self.left -= 1
        return Reply(messages=[MORE], done=not self.left)

    async def score(self, trajectory):
        return 1.0


class Chats:
    def examples(self, split):
        return [Example(id="a")]

    async def start(self, example, seed):
        return Chat()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights over bytes and the tokens of Qwen3. Turns end now and then, and are what no template writes."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), family_tokenizer("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    made = Qwen3ForCausalLM(config)
    with torch.inference_mode():
        hidden = made.model(torch.randint(0, 250, (1, 500))).last_hidden_state.mean((0, 1))
        made.lm_head.weight[tokenizer.eos_token_id] = 3 * hidden / hidden.square().sum()
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def chats(model, renderer, count):
    sampler = TorchSampler(model, config=TorchSettings(max_batch_size=16), context_length=1024)

    async def one(number):
        recorder = Recorder(len(family_tokenizer("qwen3")))
        loop = AgentLoop(
            sampler=sampler,
            renderer=renderer,
            limits=EpisodeLimits(max_context=1024),
            recorder=recorder,
            seed=number,
            params=SamplingParams(temperature=1.0, max_tokens=99, stop_token_ids=tuple(renderer.stop_token_ids)),
        )
        return await run_episode(
            environment=Chats(),
            example=Example(id="a"),
            seed=number,
            loop=loop,
            identity=RolloutIdentity(example_id="a", trajectory_id=f"{number}", group_id="g", env="chats", seed=number),
        )

    try:
        return await asyncio.gather(*map(one, range(count)))
    finally:
        await sampler.close()


@pytest.mark.slow
def test_sampler_and_trainer_agree_over_turns_that_the_template_would_write_otherwise(model):
    renderer = create_renderer("qwen3", family_tokenizer("qwen3"))
    trajectories = asyncio.run(chats(model, renderer, 32))
    extends, otherwise = 0, 0
    for trajectory in trajectories:
        assert trajectory.error is None
        for before, turn in itertools.pairwise(trajectory.turns):
            extends += turn.extends(before)
            number = trajectory.turns.index(turn)
            told = trajectory.messages[: 2 * number + 1]
            otherwise += turn.extends(before) and renderer.render_ids(told).tolist() != turn.prompt_ids.tolist()
    assert extends > 60
    assert otherwise > 50
    samples = [sample for trajectory in trajectories for sample in build_samples(trajectory)]
    assert len(samples) < sum(len(trajectory.turns) for trajectory in trajectories)
    trainer = Trainer(model, TrainerConfig(), loss=LOSSES["default"], total_optimizer_steps=1)
    difference = np.concatenate(
        [
            np.abs(ours[sample.loss_mask] - sample.logprobs[sample.loss_mask])
            for ours, sample in zip(trainer.logprobs(samples), samples, strict=True)
        ]
    )
    assert len(difference) == sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    assert difference.max() <= 5e-5
