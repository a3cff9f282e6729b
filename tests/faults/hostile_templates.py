"""Chat templates that never end, make texts of any size, or reach outside; and a program that tries each of them.

`python hostile_templates.py NAME ...` prints a line of JSON for each name: what every entry point made of it, and the
processor time and memory that it took, in a process of its own.
"""

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models" / "renderers"))  # no package: PyPI has one of that name

from random_dialogues import byte_tokenizer

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DAG = "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
_PAIRS = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
_DEEP = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}"
_BIG = "{% set big = 'ab ' * 300000 %}"
_MANY = "{% for i in range(99999) %}"

BOMBS = {
    # loops
    "nested ranges": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "three ranges": "{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}x"
    "{% endfor %}{% endfor %}{% endfor %}",
    "filtered loop": _MANY + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "loop over characters": "{% for c in 'ab' * 1000000 %}{{ c }}{% endfor %}",
    "long body": _MANY + "{{ messages[0].content | upper | lower | trim }}" * 200 + "{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "endless generator": "{% for x in [1] | slice(10 ** 12) %}{% endfor %}",
    "lists of ranges": "{% for i in range(2000) %}{% set x = range(99999) | map('string') | sort | list %}{% endfor %}",
    "star arguments": "{{ raise_exception(*([1] | slice(10 ** 12))) }}",
    # macros
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling macro": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "endless caller": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
    "endless block": "{% block again %}{{ self.again() }}{% endblock %}",
    # growing texts and lists
    "doubling by tilde": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",  # noqa: E501
    "doubling by plus": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",  # noqa: E501
    "doubling by a block": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "list times": "{{ ([1] * 10 ** 10) | length }}",
    "power": "{% set x = 9 ** (9 ** 9) %}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "hexadecimal": "{% set x = 0x" + "f" * 90000 + " // 0x" + "e" * 40000 + " %}" + "{{ x // 3 }}" * 10,
    "precision": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "to bytes": "{{ (1).to_bytes(10 ** 10, 'big') | length }}",
    "many copies": "{% set ns = namespace(x=[]) %}" + _BIG + "{% for i in range(9999) %}"
    "{% set ns.x = ns.x + [big ~ i] %}{% endfor %}",
    "huge output": _BIG + _MANY + "{{ big }}{% endfor %}",
    "huge plain output": _MANY + "x" * 5000 + "{% endfor %}",
    "words of a text": "{{ ('a ' * 1900000).split() | length }}",
    "lines of a text": "{{ ('a\\n' * 1900000).splitlines() | length }}",
    # widths
    "printf width": "{{ '%1000000000s' % 'x' }}",
    "printf star": "{{ '%*d' % (10 ** 10, 1) }}",
    "printf nested key": "{{ '%((x))1000000000d' % {'(x)': 1} }}",
    "printf filter": "{{ '%1000000000s' | format('x') }}",
    "printf repeated": _BIG + "{{ ('%(a)s' * 900) % {'a': big} }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format inner width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "replace": _BIG + "{{ big | replace('', big) }}",
    "replace method": _BIG + "{{ big.replace('a', big) }}",
    "join": _BIG + "{{ range(99999) | join(big) }}",
    "join method": _BIG + "{{ big.join('ab' * 1000) }}",
    "indent": "{{ ('a\\n' * 1000) | indent(10 ** 9) }}",
    "wordwrap": _BIG + "{{ big | wordwrap(1, true, big) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "json indent": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "translate": _BIG + "{{ big.translate({97: big}) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    # values that are small to make and huge to look at
    "shared lists written": _DAG + "{{ ns.x }}",
    "shared lists joined": _DAG + "{{ ns.x ~ '' }}",
    "shared lists as JSON": _DAG + "{{ ns.x | tojson }}",
    "shared lists compared": _DAG + _DAG.replace("ns", "other") + "{{ ns.x == other.x }}",
    "shared lists sought": _DAG + _DAG.replace("ns", "other") + "{{ ns.x in [other.x, 1] }}",
    "shared lists formatted": _DAG + "{{ '%s' % (ns.x,) }}",
    "shared lists refused": _DAG + "{{ raise_exception(ns.x) }}",
    "shared tuples as a key": _PAIRS + "{{ {ns.x: 1} }}",
    "shared tuples looked up": _PAIRS + "{{ {}[ns.x].y }}",
    "shared tuples unique": _PAIRS + "{{ [ns.x, ns.x] | unique | list | length }}",
    "shared tuples got": _PAIRS + "{{ {}.get(ns.x) }}",
    "deep list written": _DEEP + "{{ ns.x }}",
    "deep tuple as a key": _DEEP.replace("[]", "()").replace("[ns.x]", "(ns.x,)") + "{{ {ns.x: 1} }}",
    "deep generators": "{% set ns = namespace(x=['a']) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x | map('upper') %}{% endfor %}{{ ns.x | list }}",
    "spaces of namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(x=(ns.x, ns.x)) %}{% endfor %}" + _MANY + "{{ ns.x.x }}{% endfor %}",
    # slow work on texts
    "seeking": _BIG + _MANY + "{% if 'abc' in big %}{% endif %}{% endfor %}",
    "slicing": _BIG + _MANY + "{% set x = big[1:] %}{% endfor %}",
    "sorting": "{% set r = range(99999) | map('string') | list %}{% for i in range(999) %}{% set x = r | sort %}{% endfor %}",  # noqa: E501
    "sums of lists": "{% set x = ([[1] * 10] * 20000) | sum(start=[]) %}",
    "tags": "{{ ('<' * 300000 ~ '<!--') | striptags }}",
    "links": "{{ ('http://' * 200000) | urlize }}",
    "domain names": "{{ ('\u0130' * 100000).encode('idna') }}",
    "capital letters": "{% set s = '\u0390' * 100000 %}" + _MANY + "{{ s.upper() }}{% endfor %}",
    # cheating
    "income": "{% set x = [1] | map('verbatim spend', 0 - 10 ** 15, 0) | list %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    # reaching outside
    "class": "{{ messages.__class__.__mro__ }}",
    "class by attr": "{{ (messages | attr('__class__')).__mro__ }}",
    "class by map": "{{ ([messages] | map(attribute='__class__') | first).__mro__ }}",
    "class by format": "{{ '{0.__class__.__init__}'.format(messages) }}",
    "class by format_map": "{{ '{a.__class__.__init__}'.format_map({'a': messages}) }}",
    "globals of a function": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "globals by attr": "{{ (raise_exception | attr('__globals__')).os }}",
    "method of a format": "{{ ('{0.__class__.__base__}' | attr('format'))(messages) }}",
    "code of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__code__.x }}",
    "frame of a generator": "{{ ([1] | map('string')).gi_frame.f_back }}",
    "context": "{{ self._TemplateReference__context.environment }}",
    "space": "{{ namespace(__class__=1).x.y }}",
    "changes": "{{ messages.append(messages[0]) }}",
    "includes": "{% include '/etc/passwd' %}",
    "imports": "{% import '/etc/passwd' as x %}",
    # texts that are none
    "half a character": "{{ '\\ud800' }}",
    "noncharacters": "{{ '\ufdd0\ufdd1' }}{{ 1 // 0 }}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep conditions": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "long attribute": "{{ messages" + ".x" * 50000 + " }}",
    "long source": "{# " + "x" * 2000000 + " #}",
}

SOURCES = frozenset({"deep brackets", "hexadecimal", "deep conditions", "long attribute", "long source", "imports"})
"""They are refused when they are read, so nothing of them can come late."""
LATE = 20
"""Messages after which the other ones begin."""


def run(name: str) -> dict[str, str]:
    """What each entry point made of a template: "refused: ..." as it should be, or what happened."""
    from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
    from verbatim.inference.chat.openai_chat import OpenAIChat
    from verbatim.inference.http.chat_work import read_chat
    from verbatim.models.renderers import create_renderer

    def tokenizer(source: str):
        made = byte_tokenizer(PLAIN)
        made.chat_template = source
        made.name_or_path = "the-hostile-one"
        return made

    found = {}
    try:
        create_renderer("auto", tokenizer(BOMBS[name] + PLAIN))
        found["auto"] = "accepted"
    except ModelError as error:
        found["auto"] = f"refused: {error}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "the-hostile-one.jinja"
        file.write_text(BOMBS[name] + PLAIN, encoding="utf-8", errors="surrogatepass")
        found["doctor"] = _doctor(str(file))
    if name in SOURCES:
        return found
    late = "{% if messages | length > " + str(LATE) + " %}" + BOMBS[name] + "{% endif %}" + PLAIN
    if "{% block" in late:
        late = BOMBS[name].replace("{{ self.again() }}", "{% if messages | length > 20 %}{{ self.again() }}{% endif %}")
        late += PLAIN
    dialogue = [{"role": role, "content": "word"} for role in ("user", "assistant") * LATE][: LATE + 1]
    try:
        renderer = create_renderer("auto", tokenizer(late))
    except ModelError as error:
        found["late"] = f"refused at the start: {error}"
        return found
    for entry in ("late", "server"):
        try:
            if entry == "late":
                renderer.render_ids(dialogue)
            else:
                body = json.dumps({"messages": dialogue}).encode()
                read_chat(body, {}, OpenAIChat(), renderer=renderer, model="m", room=100_000, vocab_size=100_000)
            found[entry] = "accepted"
        except (TemplateFault, EnvironmentFault) as error:
            found[entry] = f"refused: {error}"
    short = renderer.render_ids(dialogue[: LATE - 1])
    found["short"] = "refused: no" if len(short) else "nothing is rendered"
    return found


def _doctor(file: str) -> str:
    from verbatim.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["doctor", "--template", file])
        except SystemExit as left:
            status = left.code
    said = " ".join(err.getvalue().split())
    if "Traceback" in said:
        return said
    return f"refused: {said}" if status == 2 else f"status {status}: {' '.join(out.getvalue().split())}"


def _in_a_process(name: str) -> dict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (3 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        start = resource.getrusage(resource.RUSAGE_SELF)
        try:
            answers = run(name)
        except BaseException as error:  # noqa: BLE001  the report says it
            answers = {"crash": f"{type(error).__name__}: {error}"[:500]}
        end = resource.getrusage(resource.RUSAGE_SELF)
        seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
        row = {"answers": answers, "seconds": seconds, "megabytes": (end.ru_maxrss * 1024 - before) / 1e6}
        os.write(writing, json.dumps(row).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"answers": {"crash": f"status {status}"}, "seconds": 0, "megabytes": 0}


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run("times")  # everything is imported, so that it does not count for one of them
    for name in sys.argv[1:] or BOMBS:
        print(json.dumps({"name": name, **_in_a_process(name)}), flush=True)
