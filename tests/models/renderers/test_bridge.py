"""Bridges on small chat templates, whose right answers can be seen by reading them."""

import threading

import numpy as np
import pytest
from random_dialogues import byte_tokenizer

from verbatim.core.errors import TemplateFault
from verbatim.models.renderers import Conversation
from verbatim.models.renderers.template import TemplateRenderer

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
    return np.asarray(renderer.tokenizer.encode(text), dtype=np.int32)


KEPT = {
    "ChatML": template(),
    "a system message apart": template(
        before=(
            "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}"
            "{% else %}{% set rest = messages %}{% endif %}"
        )
    ).replace("in messages %}\n<", "in rest %}\n<"),
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
}

REWRITTEN = {
    "the number of messages": template(before="{{ messages | length }}"),
    "the last message of all": template(before="{{ messages[-1].content }}"),
    "the last one of the loop": template("{% if loop.last %}LAST{% endif %}" + TURN),
    "the hour, to the microsecond": template(before="{{ strftime_now('%M%S%f') }}"),
    "answers above the last question dropped": template(
        "{% if m.role == 'user' or loop.index0 > messages | length - 2 %}" + TURN + "{% endif %}"
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_template_that_keeps_what_it_wrote_is_continued(name):
    renderer = renderer_of(KEPT[name])
    messages = [{"role": "system", "content": "s"}, user("hi")]
    prompt = renderer.render_ids(messages)
    for number in range(3):
        said = encoded(renderer, f"yo {number}<|im_end|>")
        messages += [{"role": "assistant", "content": f"yo {number}"}, user("so?")]
        bridged = renderer.bridge_to_next_turn(prompt, said, [user("so?")])
        assert bridged.tolist() == renderer.render_ids(messages).tolist()
        assert bridged[: len(prompt) + len(said)].tolist() == [*prompt.tolist(), *said.tolist()]
        prompt = bridged


def long_conversation(renderer, num_turns):
    conversation = Conversation.open(renderer, [user("hi")])
    said = encoded(renderer, "yo<|im_end|>")
    for number in range(num_turns):
        conversation = conversation.answered(said).continued([user(f"so {number}?")])
        assert conversation.extends
    return conversation.answered(said)


def test_what_is_behind_a_turn_of_a_long_conversation_is_found_without_rendering_it(monkeypatch):
    renderer = renderer_of(KEPT["ChatML"])
    conversation = long_conversation(renderer, 20)
    conversation.bridged([user("so?")])
    sizes, write = [], renderer.tokenizer.chat_text
    monkeypatch.setattr(renderer.tokenizer, "chat_text", lambda *given: sizes.append(len(given[0])) or write(*given))
    following = conversation.bridged([user("and so?")])
    assert renderer.decode(following.prompt_ids).endswith(
        "yo<|im_end|>\n\n<|im_start|>user\nand so?<|im_end|>\n\n<|im_start|>assistant\n"
    )
    assert max(sizes) == 3  # a question, a stand-in, and what is new


def test_a_template_that_counts_its_messages_is_rendered_however_long_the_conversation_is():
    numbered = TURN.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %}{{ loop.index }}{% endif %}")
    renderer = renderer_of(template(numbered))
    following = long_conversation(renderer, 20).bridged([user("so?")])
    assert renderer.decode(following.prompt_ids).endswith(
        "yo<|im_end|>\n\n<|im_start|>user\nso?43<|im_end|>\n\n<|im_start|>assistant\n"
    )


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


def test_an_answer_that_history_would_write_otherwise_stays_as_it_was_sampled():
    renderer = renderer_of(
        template(
            TURN.replace("m.content", "m.content | upper if m.role == 'assistant' and not loop.last else m.content")
        )
    )
    prompt = renderer.render_ids([user("hi")])
    bridged = renderer.bridge_to_next_turn(prompt, encoded(renderer, "yo<|im_end|>"), [user("so?")])
    assert renderer.decode(bridged[len(prompt) :]).startswith("yo<|im_end|>\n\n<|im_start|>user\nso?")


def test_conversations_with_the_same_prompt_are_told_apart_by_their_handles():
    renderer = renderer_of(PLAIN + "{% if messages | length > 2 %}{{ messages | length }}{% endif %}")
    one, two = [user("a\nuser: b")], [user("a"), user("b")]
    ends = encoded(renderer, "yo\n<eos>")
    first, second = (Conversation.open(renderer, messages).answered(ends) for messages in (one, two))
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    texts = [renderer.decode(conversation.bridged([user("so?")]).prompt_ids) for conversation in (first, second)]
    assert [text[-1] for text in texts] == ["3", "4"]


def test_a_bridge_stays_within_the_budget_of_a_rendering():
    renderer = renderer_of(template(before=SLOW))
    prompt = renderer.render_ids([user("a"), user("b"), user("c")])
    with pytest.raises(TemplateFault, match="does not finish rendering 5 messages"):
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
