"""What is proven about small chat templates, whose right answers can be seen by reading them."""

import pytest

from verbatim.renderers.proof import proof_table

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(turn=TURN, before="", after=PROMPT):
    return f"{before}\n{{% for m in messages %}}\n{turn}\n{{% endfor %}}\n{after}"


def outcomes(text):
    return {row.kind: row.outcome for row in proof_table(text)}


def refused(text, kind):
    (row,) = (row for row in proof_table(text) if row.kind == kind)
    return row.line if row.outcome == "refused" else None


BOTH = {"tool": "always", "user": "always"}

KEPT = {
    "ChatML": template(),
    "a system message apart": template(before=(
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}"
    )).replace("in messages %}\n<", "in rest %}\n<"),
    "the first message only": template("{% if loop.first %}FIRST{% endif %}" + TURN),
    "a look at the message before": template(
        "{% if loop.previtem and loop.previtem.role == 'tool' %}T{% endif %}" + TURN
    ),
    "a look at the next, decided by the turn that follows": template(
        TURN + "{% if m.role == 'tool' and loop.nextitem and loop.nextitem.role == 'tool' %}{% endif %}"
    ),
    "tools at the start": template(before="{% if tools %}{{ tools | tojson }}{% endif %}"),
    "a macro": template(
        "<|im_start|>{{ m.role }}\n{{ shown(m.content) }}<|im_end|>\n",
        before="{% macro shown(text) %}{{ text | trim }}{% endmacro %}",
    ),
    "marked for training": template(
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
        + TURN + "{% endif %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_looks_at_nothing_ahead_is_always_continued(name):
    assert outcomes(KEPT[name]) == BOTH


AHEAD = {
    "the last message of all": (TURN + "\n{% if messages[-1].role == 'user' %}U{% endif %}", 6),
    "how many there are": (TURN + "\n{{ messages | length }}", 6),
    "the length, through the loop": (TURN + "\n{{ loop.length }}", 6),
    "how many are left": (TURN + "\n{{ loop.revindex }}", 6),
    "whether it is the last": ("{% if loop.last %}\n!{% endif %}" + TURN, 3),
}


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("kind", ["tool", "user"])
def test_what_looks_ahead_is_refused_at_its_line(name, kind):
    turn, line = AHEAD[name]
    assert refused(template(turn), kind) == line


def test_an_end_that_is_written_after_the_last_message_only_is_no_history():
    # Every message but the last ends in a token: appending one changes the end of what was last.
    text = template("<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}")
    assert outcomes(text) == {"tool": "refused", "user": "refused"}


def test_thinking_that_is_dropped_at_the_next_question_is_a_condition_for_users():
    text = template(
        "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}" + TURN,
        before=(
            "{% set ns = namespace(last=0) %}{% for m in messages %}"
            "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        ),
    )
    rows = {row.kind: row for row in proof_table(text)}
    assert rows["tool"].outcome == "always"
    assert (rows["user"].outcome, rows["user"].conditions) == ("condition", ("nothing has been thought",))


def test_a_search_from_the_end_is_understood_as_one_from_the_start():
    text = template(
        "{% if m.reasoning_content and loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}" + TURN,
        before=(
            "{% set ns = namespace(seek=true, last=0) %}{% for m in messages[::-1] %}"
            "{% if ns.seek and m.role == 'user' %}{% set ns.seek = false %}"
            "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        ),
    )
    assert outcomes(text) == {"tool": "always", "user": "condition"}


def test_tools_that_stand_at_the_last_question_move_when_another_one_comes():
    text = template(
        "{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}{% endif %}" + TURN,
        before=(
            "{% set ns = namespace(last=-1) %}{% for m in messages %}"
            "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        ),
    )
    rows = {row.kind: row.outcome for row in proof_table(text)}
    assert rows["tool"] == "always"
    assert rows["user"] == "refused"


def test_what_is_counted_over_the_whole_history_is_known_only_where_nothing_was_counted():
    # The number of tools' answers so far is written: it is kept, but a short history does not show it.
    text = template(
        "{% if m.role == 'tool' %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endif %}" + TURN,
        before="{% set ns = namespace(n=0) %}",
    )
    (row,) = (row for row in proof_table(text) if row.kind == "tool")
    assert (row.outcome, row.conditions) == ("condition", ("no tool was called before",))


@pytest.mark.parametrize(
    "text",
    [
        template("{% if loop.first and messages | selectattr('role', 'equalto', 'tool') | list %}T{% endif %}" + TURN),
        template(before="{{ messages | tojson }}"),
        template(before="{{ messages | map(attribute='role') | join(',') }}"),
        template("{% for other in messages %}{{ other.role }}{% endfor %}" + TURN),
        template().replace("in messages %}", "in messages | sort(attribute='role') %}"),
        template().replace("in messages %}", "in messages | reverse %}"),
        template().replace("in messages %}", "in messages[-4:] %}"),
        template().replace("in messages %}", "in messages if m.role != 'system' %}"),
        "{{ messages | batch(2) | list }}" + PROMPT,
        template("{{ m.pop('role') }}" + TURN, before="{% set messages = messages + messages[-1:] %}"),
    ],
)
def test_what_reads_all_messages_at_once_is_refused(text):
    assert outcomes(text) == {"tool": "refused", "user": "refused"}


def test_a_template_with_too_many_ways_through_is_refused_and_not_waited_for():
    tests = "".join(f"{{% if 'w{i}' in messages[0].content %}}{{% set x{i} = 1 %}}{{% endif %}}" for i in range(14))
    text = template(before=tests, after="".join(f"{{{{ x{i} }}}}" for i in range(14)) + PROMPT)
    rows = proof_table(text)
    assert [(row.outcome, row.reason) for row in rows] == [
        ("refused", "too many different ways through the template")
    ] * 2
