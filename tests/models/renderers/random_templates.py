"""Random chat templates, most of them ill-behaved: whatever looks ahead, back or at the whole, in every combination."""

import random

_PRELUDES = (
    "",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}<s>{% set messages = messages[1:] %}{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.x = loop.index0 %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% set ns.y = true %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.z = m.content %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages[::-1] %}{% if ns.y and m.role == 'user' %}{% set ns.y = false %}"
    "{% set ns.x = (messages|length - 1) - loop.index0 %}{% endif %}{% endfor %}",
    "{% for i in range(messages|length) %}"
    "{% if messages[i].role == 'assistant' %}{% set ns.x = i %}{% endif %}{% endfor %}",
    "{% if messages|length > 4 %}{% set ns.z = 'long' %}{% endif %}",
    "{% macro say(t) %}{% if t is string %}{{ t|trim }}{% endif %}{% endmacro %}",
)
_TESTS = (
    "loop.last", "loop.first", "loop.index0 > ns.x", "loop.index0 < ns.x", "loop.index0 % 2 == 0", "m.role == 'user'",
    "m.role == 'tool'", "m.tool_calls", "m.reasoning_content", "'</think>' in m.content", "m.content", "ns.y",
    "loop.nextitem and loop.nextitem.role == 'tool'", "loop.previtem and loop.previtem.role == 'tool'",
    "not loop.last and messages[loop.index0 + 1].role == 'user'", "messages[loop.index0 - 1].role == 'tool'",
    "loop.last or messages[loop.index0 + 1].role != 'tool'", "messages|length > 5", "messages[-1].role == 'tool'",
    "ns.z", "tools", "m.name", "loop.index0 == ns.x", "m.role == 'assistant' and loop.index0 > ns.x",
    "m.tool_calls is defined and loop.last", "loop.length > 3", "ns.z == m.role",
)  # fmt: skip
_ACTIONS = (
    "A",
    "{{ m.content }}",
    "{{ m.reasoning_content }}",
    "{% set ns.y = true %}",
    "{% set ns.y = false %}",
    "{% set ns.z = m.role %}",
    "{{ ns.z }}",
    "{% set ns.x = loop.index0 %}",
    "",
    "",
    "{{ m.name }}",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
    "{{ loop.index }}",
    "{% for k in messages[loop.index:] %}{% if k.role == 'user' %}{% set ns.y = true %}{% endif %}{% endfor %}",
    "{% set ns.z = ns.z ~ 'x' %}",
    "{{ raise_exception('no') if m.role == 'tool' and loop.first }}",
)


def random_template(seed: int) -> str:
    """A template that writes every message's role and content, and a few things more."""
    pick = random.Random(seed)

    def branch() -> str:
        test = pick.choice(_TESTS)
        if pick.random() < 0.3:
            test = f"({test}) and ({pick.choice(_TESTS)})"
        return f"{{% if {test} %}}{pick.choice(_ACTIONS)}{{% else %}}{pick.choice(_ACTIONS)}{{% endif %}}"

    body = [branch() for _ in range(pick.choice((0, 1, 1, 2, 2, 3)))]
    body.insert(pick.randint(0, len(body)), "{{ m.content }}")
    preludes = pick.sample(_PRELUDES, pick.choice((0, 1, 1, 2)))
    x, y = pick.choice((-1, 0, "messages|length")), pick.choice(("true", "false"))
    start = f"{{% set ns = namespace(x={x}, y={y}, z='') %}}{''.join(preludes)}"
    end = pick.choice(("", "", "", "{% if ns.y %}Y{% endif %}", "{{ ns.z }}", "{% if not ns.y %}<|end|>{% endif %}"))
    return (
        f"{start}{{% for m in messages %}}<|{{{{ m.role }}}}|>{''.join(body)}<|eot|>\n{{% endfor %}}{end}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
