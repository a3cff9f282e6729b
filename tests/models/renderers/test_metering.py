"""The budget of a rendering: it changes nothing of what templates write, grows with a conversation, and holds."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
from random_dialogues import byte_tokenizer

from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.chat_template import ChatTemplate
from verbatim.models.renderers.detect_family import PROBES
from verbatim.models.renderers.metering.meter import MAX_DEPTH, Meter

FOLDER = Path(__file__).parent / "data"
SOURCES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*_templates/*.jinja"))}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USER, ANSWER = {"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "word " * 20}


def written(render):
    """The text, or that there is none."""
    try:
        return render()
    except Exception:  # noqa: BLE001  whatever a template raises
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_template_writes_what_transformers_gives(name):
    tokenizer = byte_tokenizer(SOURCES[name])
    ours = ChatTemplate(SOURCES[name], tokenizer.special_tokens_map)
    for about, messages, tools in PROBES:
        for generation in (True, False):
            theirs = written(
                lambda messages=messages, tools=tools, generation=generation: tokenizer.apply_chat_template(
                    copy.deepcopy(list(messages)), tools=tools, tokenize=False, add_generation_prompt=generation
                )
            )
            mine = written(
                lambda messages=messages, tools=tools, generation=generation: ours.text(messages, tools, generation)
            )
            assert mine == theirs, about


def text(source, messages=(USER,), **variables):
    return ChatTemplate(source, variables).text(messages, None, False)


EXPRESSIONS = {
    "{{ 1 + 2 * 3 ** 2 - 4 // 3 % 5 }}": "18",
    "{{ 7 / 2 }} {{ -7 // 2 }} {{ 'ab' * 2 }} {{ [1] * 2 + [3] }}": "3.5 -4 abab [1, 1, 3]",
    "{{ '%s-%05.1f' % ('a', 2.25) }} {{ '%(a)s' % {'a': 1} }} {{ '%s %s' | format(1, 2) }}": "a-002.2 1 1 2",
    "{{ '{:>4}|{a!r}'.format(1, a='x') }} {{ '{a}'.format_map({'a': 2}) }}": "   1|'x' 2",
    "{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' in 'cat' }} {{ 'x' not in ['a', none] }}": "True False True True",
    "{{ 1 ~ 'a' ~ none ~ [1] }}": "1aNone[1]",
    "{{ messages[0].content[:4] }} {{ [1, 2, 3][::-1] }} {{ messages[0]['role'] }}": "word [3, 2, 1] user",
    "{{ {'a': 1, 2: 'b'}.items() | list }} {{ {'a': 1} | tojson }}": "[('a', 1), (2, 'b')] {\"a\": 1}",
    "{{ ['b', 'a'] | sort | join(', ') }} {{ [1, 2] | map('string') | join('-') }}": "a, b 1-2",
    "{% for a in [1, 2, 3] if a > 1 %}{{ loop.index }}{{ loop.last }}{{ a }};{% else %}none{% endfor %}": "1False2;2True3;",  # noqa: E501
    "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}": "12",
    "{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}"
    "{% call f(3) %}x{% endcall %}": "<12><32x>",
    "{% set ns = namespace(x=0) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}": "3",
    "{% set it = [1, 2, 3] | map('string') %}{{ it | first }}{{ it | list }}": "1['2', '3']",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}": "a1B",
    "{% generation %}{{ messages[0].role }}{% endgeneration %}": "user",
    "{{ 'a<b>' | e }}{{ 'a' is in ['a'] }}{{ missing is defined }}{{ missing }}": "a&lt;b&gt;TrueFalse",
    "{{ 'a,b'.split(',')[1] }}{{ ' x '.strip() }}{{ 'abc'.replace('b', '--') }}{{ 'x'.encode().decode() }}": "bxa--cx",
    "{{ 'k' in messages[0] }}{{ messages[0].get('k', 'd') }}{{ messages[0].keys() | list }}": "Falsed['role', 'content']",  # noqa: E501
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% block x %}y{% endblock %}": "a1y",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}{{ j() }}x{{ j() }}": "abx|",
    "{{ strftime_now('%Y') | length }}{{ 0.1 + 0.2 }}{{ 10 ** 30 }}": "40.30000000000000004" + "1" + "0" * 30,
}


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_jinja(source):
    assert text(source) == EXPRESSIONS[source]


def test_the_budget_grows_with_the_conversation():
    quadratic = (
        PLAIN + "{% for m in messages %}{% for n in messages %}{% if n.role == m.role %}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    assert text(quadratic, [USER, ANSWER] * 100).count("\n") == 200
    with pytest.raises(TemplateFault, match="does not finish rendering 1 messages"):
        text(quadratic.replace("n in messages", "n in range(99999)").replace("m in messages", "m in range(99)"))


def test_a_long_text_may_be_copied_and_taken_apart():
    long = {"role": "user", "content": "word " * 200_000}
    source = PLAIN + "{% for m in messages %}{{ (m.content ~ '!').split() | length }}{{ m.content | upper }}"
    source += "{% endfor %}"
    assert text(source, [long]).count("WORD") == 200_000


def test_text_that_gathers_over_a_long_conversation_is_no_overrun():
    gathering = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 5_000}] * 400
    assert len(text(gathering + "{{ ns.x }}", messages)) == 400 * 5_000


def test_the_same_rendering_spends_the_same():
    spent = []
    for _ in range(2):
        meter = Meter()
        given = meter.given([USER, ANSWER], None)
        spent.append((meter.left, meter.room, meter.output, [meter.size(value) for value in given]))
    assert spent[0] == spent[1]


def test_values_of_other_types_are_shown_by_their_names_and_lend_no_methods():
    class Thing:
        def go(self):
            raise AssertionError

    class Word(str):
        def go(self):
            raise AssertionError

    message = {"role": "user", "content": Word("w"), "x": Thing(), "n": np.float32(0.5), "t": (1, 2)}
    assert (
        text("{{ messages[0].content }}{{ messages[0].x }}{{ messages[0].n }}{{ messages[0].t }}", [message])
        == "w<Thing>0.5(1, 2)"
    )
    with pytest.raises(EnvironmentFault, match="go"):
        text("{{ messages[0].content.go() }}", [message])


def test_lists_may_be_nested_and_not_without_bounds():
    nest = "{% set ns = namespace(x=[]) %}{% for i in range(DEPTH) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"
    assert text(nest.replace("DEPTH", "50")) == "[" * 51 + "]" * 51
    with pytest.raises(TemplateFault, match=f"deeper than {MAX_DEPTH} levels"):
        text(nest.replace("DEPTH", "300"))


def test_a_template_that_explodes_later_names_itself_and_leaves_earlier_turns_alone():
    late = "{% if messages | length > 20 %}{{ 'a' * 10 ** 10 }}{% endif %}<|im_start|>" + PLAIN + "<|im_end|>"
    tokenizer = byte_tokenizer(late)
    tokenizer.name_or_path = "a-model"
    renderer = create_renderer("template", tokenizer)
    assert len(renderer.render_ids([USER, ANSWER] * 10))
    said = "the chat template of 'a-model' does not finish rendering 21 messages (it makes too much text); fix"
    with pytest.raises(TemplateFault, match=re.escape(said)):
        renderer.render_ids([*[USER, ANSWER] * 10, USER])


def test_a_template_that_explodes_at_once_is_refused_by_name():
    tokenizer = byte_tokenizer("{{ 'a' * 10 ** 10 }}" + PLAIN)
    tokenizer.name_or_path = "a-model"
    with pytest.raises(ModelError, match="the chat template of 'a-model' does not finish rendering"):
        create_renderer("auto", tokenizer)
