"""Bridges on small chat templates, whose right answers can be seen by reading them."""

import gc
import threading

import numpy as np
import pytest
from random_dialogues import byte_tokenizer

from verbatim.errors import TemplateFault
from verbatim.renderers.template import TemplateRenderer

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SLOW = (
    "{% if messages | length > 4 %}{% for i in range(90000) %}{% for k in range(1000) %}{% endfor %}{% endfor %}"
    "{% endif %}"
)


def template(turn=TURN, before="", after=PROMPT):
    return f"{before}\n{{% for m in messages %}}\n{turn}\n{{% endfor %}}\n{after}"


def user(text):
    return {"role": "user", "content": text}


def renderer_of(source):
    return TemplateRenderer(byte_tokenizer(source))


def encoded(renderer, text):
    return np.asarray(renderer._tokenizer.encode(text), dtype=np.int32)


KEPT = {
    "ChatML": template(),
    "a system message apart": template(before=(
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}"
    )).replace("in messages %}\n<", "in rest %}\n<"),
    "a look at the message before": template(
        "{% if loop.previtem and loop.previtem.role == 'tool' %}T{% endif %}" + TURN
    ),
    "a macro that gets every message": template(
        "{{ written(messages, loop.index0) }}",
        before=(
            "{% macro written(all, i) %}<|im_start|>{{ all[i].role }}\n{{ all[i].content }}<|im_end|>\n{% endmacro %}"
        ),
    ),
    "white space trimmed": template(TURN.replace("m.content", "m.content | trim")),
    "marked for training": template(
        "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}" + TURN + "{% endif %}"
    ),
}  # fmt: skip

REWRITTEN = {
    "the number of messages": template(before="{{ messages | length }}"),
    "the last message of all": template(before="{{ messages[-1].content }}"),
    "the last one of the loop": template("{% if loop.last %}LAST{% endif %}" + TURN),
    "the hour, to the microsecond": template(before="{{ strftime_now('%M%S%f') }}"),
    "answers above the last question dropped": template(
        "{% if m.role == 'user' or loop.index0 > messages | length - 2 %}" + TURN + "{% endif %}"
    ),
    "an answer in capitals once the user has spoken": template(
        TURN.replace("m.content", "m.content | upper if m.role == 'assistant' and not loop.last else m.content")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_template_that_keeps_what_it_wrote_is_continued_with_one_rendering(name):
    renderer = renderer_of(KEPT[name])
    messages = [{"role": "system", "content": "s"}, user("hi")]
    prompt = renderer.render_ids(messages)
    renderings = []
    render = renderer._render
    renderer._render = lambda *given: renderings.append(len(given[0])) or render(*given)
    for number in range(3):
        said = encoded(renderer, f"yo {number}<|im_end|>")
        messages += [{"role": "assistant", "content": f"yo {number}"}, user("so?")]
        bridged = renderer.bridge_to_next_turn(prompt, said, [user("so?")])
        assert bridged.tolist() == renderer.render_ids(messages).tolist()
        assert bridged[: len(prompt) + len(said)].tolist() == [*prompt.tolist(), *said.tolist()]
        assert renderings == [4 + 2 * number, 4 + 2 * number]  # the bridge's one, and the comparison's
        renderings.clear()
        prompt = bridged


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_template_that_rewrites_what_it_wrote_starts_a_new_sample(name):
    renderer = renderer_of(REWRITTEN[name])
    prompt = renderer.render_ids([user("hi")])
    assert renderer.bridge_to_next_turn(prompt, encoded(renderer, "yo<|im_end|>"), [user("so?")]) is None


def test_messages_that_are_edited_after_they_were_rendered_are_not_read_again():
    renderer = renderer_of(template(before="{% for m in messages %}{{ m.tag }}{% endfor %}"))
    message = {"role": "user", "content": "hi", "tag": ""}
    prompt = renderer.render_ids([message])
    message["content"] = "edited"
    bridged = renderer.bridge_to_next_turn(prompt, encoded(renderer, "yo<|im_end|>"), [user("so?")])
    assert "hi<|im_end|>" in renderer.decode(bridged)
    assert "edited" not in renderer.decode(bridged)


def test_conversations_with_the_same_prompt_are_continued_where_they_come_to_the_same():
    renderer = renderer_of(PLAIN)
    one, two = [user("a\nuser: b")], [user("a"), user("b")]
    ends = encoded(renderer, "yo\n<eos>")
    prompts = [renderer.render_ids(messages) for messages in (one, two)]
    assert prompts[0].tolist() == prompts[1].tolist()
    assert renderer.bridge_to_next_turn(prompts[0], ends, [user("so?")]) is not None

    counts = renderer_of(PLAIN + "{% if messages | length > 2 %}{{ messages | length }}{% endif %}")
    prompts = [counts.render_ids(messages) for messages in (one, two)]
    assert prompts[0].tolist() == prompts[1].tolist()
    assert counts.bridge_to_next_turn(prompts[0], ends, [user("so?")]) is None
    del prompts
    alone = counts.render_ids(one)
    assert counts.bridge_to_next_turn(alone, ends, [user("so?")]) is not None


def test_too_many_conversations_with_the_same_prompt_are_not_told_apart():
    renderer = renderer_of(template())
    prompts = [renderer.render_ids([{**user("hi"), "mood": f"{number}"}]) for number in range(9)]
    said = encoded(renderer, "yo<|im_end|>")
    assert renderer.bridge_to_next_turn(prompts[0], said, [user("so?")]) is None
    del prompts
    prompts = [renderer.render_ids([{**user("hi"), "mood": f"{number}"}]) for number in range(8)]
    assert renderer.bridge_to_next_turn(prompts[0], said, [user("so?")]) is not None


@pytest.fixture
def quick_gc():
    """The collector looks only at what is made from now on, not at everything that is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_only_the_newest_text_of_each_open_thread_is_held(quick_gc):
    renderer = renderer_of(template())
    kept = renderer._bridge._open
    said = encoded(renderer, "yo<|im_end|>")
    threads = [renderer.render_ids([user("hi")]) for _ in range(3)]
    assert len(kept) == 1  # they begin alike
    for turn in range(5):
        for thread in range(3):
            threads[thread] = renderer.bridge_to_next_turn(threads[thread], said, [user(f"{thread} {turn}")])
        gc.collect()
        assert len(kept) == 3
    threads.clear()
    gc.collect()
    assert len(kept) == 0


def test_a_prompt_is_continued_in_several_ways_and_for_as_long_as_one_holds_it(quick_gc):
    renderer = renderer_of(template())
    said = encoded(renderer, "yo<|im_end|>")
    held, again = renderer.render_ids([user("hi")]), renderer.render_ids([user("hi")])
    branches = [renderer.bridge_to_next_turn(held, said, [user(f"{number}")]) for number in range(3)]
    assert all(branch is not None for branch in branches)
    del held
    assert renderer.bridge_to_next_turn(again, said, [user("so?")]) is not None
    copied = np.array(again)
    assert renderer.bridge_to_next_turn(copied, said, [user("so?")]) is not None  # ids are ids
    del again
    gc.collect()
    assert renderer.bridge_to_next_turn(copied, said, [user("so?")]) is None


def test_a_bridge_stays_within_the_budget_of_a_rendering():
    renderer = renderer_of(template(before=SLOW))
    prompt = renderer.render_ids([user("a"), user("b"), user("c")])
    with pytest.raises(TemplateFault, match="does not come to an end with 5 messages"):
        renderer.bridge_to_next_turn(prompt, encoded(renderer, "yo<|im_end|>"), [user("so?")])


def test_threads_share_a_renderer():
    renderer = renderer_of(template())
    said = encoded(renderer, "yo<|im_end|>")
    failed = []

    def play(number):
        for again in range(20):
            prompt = renderer.render_ids([user("hi")])
            for turn in range(4):
                prompt = renderer.bridge_to_next_turn(prompt, said, [user(f"{number} {again} {turn}")])
                if prompt is None:
                    failed.append((number, again, turn))
                    break

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
