"""The page in a headless Chromium, over run folders that the writers of a run made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Page
from page_runs import HOSTILE, encoder, episode, make_page_run, outcome, step_metrics
from serving_page import serving_page, serving_to
from viewer_runs import make_run

from verbatim.core.types import Turn
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page_run(tmp_path_factory.mktemp("runs") / "tries", hostile=True)


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with serving_page(run) as address:
        yield address


ROW = "[data-testid=row] .trajectory_id"


def press_button(page: Page, selector: str, begins: str) -> None:
    """Press the button with a text that begins so, once it is there."""
    button = f"[...document.querySelectorAll('{selector}')].find(b => b.textContent.startsWith({json.dumps(begins)}))"
    page.wait(button)
    page.evaluate(f"{button}.click()")


def choose(page: Page, selector: str, value: str) -> None:
    """Choose a value of a select element, once it is there."""
    page.wait(f"document.querySelector('{selector}')")
    page.evaluate(
        f"(() => {{ const s = document.querySelector('{selector}'); s.value = '{value}'; "
        "s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")


def rows(page: Page) -> list[str]:
    """The ids in the table, as far as they are drawn."""
    return page.evaluate(f"[...document.querySelectorAll('{ROW}')].map(e => e.textContent)")


def wait_rows(page: Page, count: int) -> None:
    """Until the table has so many, and the first of them are drawn."""
    page.wait(f"document.querySelector('.found')?.textContent.startsWith('{count} of')")
    page.wait(f"document.querySelectorAll('[data-testid=row] .trajectory_id').length >= Math.min({count}, 10)")


@pytest.mark.slow
def test_the_overview_draws_curves_shares_and_the_time_of_each_side(page: Page, url: str):
    page.open(url)
    page.wait("document.querySelector('.u-over')")
    page.expect("performance.getEntriesByName('verbatim:overview').length", 1)
    titles = page.evaluate("[...document.querySelectorAll('.chart h3')].map(e => e.textContent)")
    assert {
        "Reward",
        "Success",
        "Length",
        "Turns",
        "Mismatch KL",
        "Gradient norm",
        "Staleness",
        "Sampled tokens",
        "Sampler's time",
        "Trainer's time",
        "Evaluation",
    } <= set(titles)
    card = "[...document.querySelectorAll('.chart')].find(e => e.textContent.startsWith('Sampled tokens'))"
    shares = f"({card}.querySelector('.legend')?.innerText ?? '').split('\\n').filter(line => line.includes('%'))"
    # 600 tokens in all: 420 trained, 120 dropped by the filter, 60 pending.
    page.expect(shares, ["70.0% · 420", "20.0% · 120", "10.0% · 60"])
    assert page.evaluate("performance.getEntriesByName('verbatim:overview').length") == 1
    assert {request.split("/")[2] for request in page.requests if request.startswith("http")} == {url.split("/")[2]}


@pytest.mark.slow
def test_the_arrow_keys_walk_along_a_curve(page: Page, url: str):
    page.open(url)
    page.wait("document.querySelector('.u-over')")
    page.evaluate("document.querySelector('.plot').focus()")
    page.press("ArrowRight", "ArrowRight", "ArrowRight")
    page.wait("document.querySelector('.chart .at').textContent === 'step 3'")
    assert text_of(page, ".chart .legend output") == "0.3"


@pytest.mark.slow
def test_the_table_is_filtered_searched_sorted_and_walked_with_keys(page: Page, url: str):
    page.open(f"{url}/#/trajectories/0")
    wait_rows(page, 30 + len(HOSTILE))
    choose(page, "[data-testid=filter-env]", "maze")
    wait_rows(page, 6)
    assert rows(page) == ["m6", "m5", "m4", "m3", "m2", "m1"]
    assert "env=maze" in page.evaluate("location.hash")
    page.press("Escape")
    wait_rows(page, 30 + len(HOSTILE))
    page.press("/")
    page.type("answer of 4-")
    wait_rows(page, 4)
    assert sorted(rows(page)) == ["t4-0", "t4-1", "t4-2", "t4-3"]
    press_button(page, ".head button", "reward")
    page.wait(f"document.querySelector('{ROW}')?.textContent === 't4-3'")
    assert rows(page) == ["t4-3", "t4-2", "t4-1", "t4-0"]
    drawn = "performance.getEntriesByName('verbatim:table').length"
    for title in page.evaluate("[...document.querySelectorAll('.head button')].map(b => b.textContent)")[:-1]:
        before = page.evaluate(drawn)
        press_button(page, ".head button", title.split(" ")[0])
        page.wait(f"{drawn} > {before}")
        wait_rows(page, 4)
    press_button(page, ".head button", "flags")
    page.wait("document.querySelector('.head .flags').getAttribute('aria-sort') === 'ascending'")
    press_button(page, ".head button", "reward")
    page.wait(f"document.querySelector('{ROW}')?.textContent === 't4-3'")
    page.evaluate("document.querySelector('[role=grid]').focus()")
    page.press("ArrowDown", "ArrowDown", "Enter")
    page.wait("document.querySelector('.trajectory .crumbs b')?.textContent === 't4-1'")
    page.press("Escape")
    wait_rows(page, 4)
    assert text_of(page, ".row.active .trajectory_id") == "t4-1", "the place is kept"


@pytest.mark.slow
def test_a_link_brings_back_filters_and_order(page: Page, url: str):
    page.open(f"{url}/#/trajectories/0?step=2..3&reward=0.5..&sort=reward&env=game")
    wait_rows(page, 4)
    assert rows(page) == ["t3-2", "t2-2", "t3-3", "t2-3"]


@pytest.mark.slow
def test_tokens_say_their_values_to_the_keyboard_and_the_link_names_them(page: Page, url: str, run: Path):
    page.open(f"{url}/#/trajectory/0/t5-2")
    page.wait("document.querySelector('[data-testid=token]')")
    page.evaluate("document.querySelector('.tokens').focus()")
    page.press("ArrowRight", "ArrowRight")
    # The focus chooses the first sampled token, the keys the third: the "e" of "guess", of logprob -0.03.
    page.wait("document.querySelector('.inspector')?.textContent.includes('sampled token 2')")
    (expected,) = encoder(run / "model")("e")
    assert text_of(page, ".inspector h2 b") == str(expected)
    said = text_of(page, ".inspector dl")
    assert "sampled token 2" in said and "−0.03" in said and "+0.1" in said and "+0.125" in said and "−0.5" in said
    place = page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('token')")
    page.open("about:blank")
    page.open(f"{url}/#/trajectory/0/t5-2?token={place}")
    page.wait("document.querySelector('.inspector h2 b')")
    assert text_of(page, ".inspector h2 b") == str(expected)


@pytest.mark.slow
def test_a_token_says_among_how_many_ids_it_was_drawn(page: Page, tmp_path: Path):
    folder = make_page_run(tmp_path / "kept", steps=1)
    encode = encoder(folder / "model")
    a, b, c, *prompt = encode("abcuser: Say abc.")
    turn = Turn(prompt_ids=prompt, completion_ids=[a, b, c], logprobs=[0.0, -0.5, -1.0], kept_sets=[[a], [a, b], []])
    turns = {"kept": turn, "whole": replace(turn, kept_sets=None)}
    scored = [outcome(episode(encode, name, turns=[turn], messages=[])) for name, turn in turns.items()]
    OutcomeFolder(folder / "trajectories").write(2, scored)
    some = ["1 id that top_p, top_k and min_p kept", "2 ids that top_p, top_k and min_p kept", "the whole vocabulary"]
    drawn = "[...document.querySelectorAll('.inspector dt')].find(e => e.textContent === 'drawn among')"
    with serving_to(page, folder) as address:
        for name, said in (("kept", some), ("whole", [None] * 3)):
            page.open("about:blank")
            page.open(f"{address}/#/trajectory/0/{name}")
            page.wait("document.querySelector('[data-testid=token]')")
            page.evaluate("document.querySelector('.tokens').focus()")
            for token, expected in enumerate(said):
                page.wait(f"document.querySelector('.inspector')?.textContent.includes('sampled token {token}')")
                assert page.evaluate(f"{drawn}?.nextSibling.textContent ?? null") == expected
                page.press("ArrowRight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "classes"),
    [
        ("1", {"f0"}),
        ("2", {"s0", "s1", "s2"}),
        ("3", {"p4"}),
        ("4", {"p3"}),
        ("5", {"s1", "s7"}),
        ("7", {"n4"}),
    ],
)
def test_a_key_colours_the_sampled_tokens(page: Page, url: str, key: str, classes: set[str]):
    page.open(f"{url}/#/trajectory/0/t5-2")
    page.wait("document.querySelector('[data-testid=token]')")
    page.press(key)
    radio = f".segments [role=radio]:nth-of-type({key})"
    page.wait(f"document.querySelector('{radio}').getAttribute('aria-checked') === 'true'")
    found = page.evaluate("[...document.querySelectorAll('[data-testid=token]')].map(e => e.classList[1])")
    assert set(found) == classes


@pytest.mark.slow
def test_a_group_stands_side_by_side_with_its_prefix_tree(page: Page, url: str):
    page.open(f"{url}/#/trajectories/0?env=game&step=6..6")
    wait_rows(page, 4)
    page.evaluate("document.querySelector('[role=grid]').focus()")
    page.press("g")
    page.expect("document.querySelectorAll('.column .message').length", 12)
    assert page.evaluate("document.querySelectorAll('.column').length") == 4
    # The four share everything up to the last character of their answers.
    assert page.evaluate("document.querySelectorAll('.tree .node').length") == 5
    assert page.evaluate("document.querySelector('.column.best header b').textContent") == "3"


@pytest.mark.slow
def test_hostile_texts_are_shown_as_they_are_and_do_nothing(page: Page, url: str):
    page.open(f"{url}/#/trajectories/0?env=hostile&sort=sample_index")
    wait_rows(page, len(HOSTILE))
    table = page.evaluate("[...document.querySelectorAll('.row .example_id')].slice(1).map(e => e.textContent)")
    assert table == [visible(stored(text)) for text in HOSTILE.values()]
    for index, (kind, text) in enumerate(HOSTILE.items()):
        page.evaluate(f"location.hash = '#/trajectory/0/hostile-{index}?color=logprob'")
        page.wait(
            f"document.querySelector('.crumbs b')?.textContent === 'hostile-{index}' "
            "&& document.querySelector('[data-testid=token]')"
        )
        shown = page.evaluate("[...document.querySelectorAll('.message.assistant .prose')].at(-1).textContent")
        assert shown == visible(text), kind
        assert (
            page.evaluate(
                "document.querySelectorAll('main script, main img, main svg, main iframe, main style, "
                "main link, main base, main meta').length"
            )
            == 0
        ), kind
        tokens = page.evaluate("[...document.querySelectorAll('.tokens')].at(-1).textContent")
        if text.isascii() and text.isprintable():
            assert tokens.replace("·", " ") == f"{text}<|end|>", kind
    page.evaluate("location.hash = '#/overview/0'")
    page.wait("document.querySelector('.u-over')")
    page.settle()
    assert page.evaluate("window.hacked") is None
    assert not [request for request in page.requests if "example.invalid" in request]


def stored(text: str) -> str:
    """A name as a outcome file has it."""
    return text.encode("utf-8", "backslashreplace").decode()


def visible(text: str) -> str:
    """What stands on the page for a text: signs in place of what would not be seen."""
    unseen = (0x85, 0x9B, 0xAD, 0x61C, 0x200B, 0x200D, 0x200F, 0x2028, 0x202E, 0x2066, 0x2069, 0xFEFF)
    signs = {
        "\x00": "NUL",
        "\x01": "SOH",
        "\x07": "BEL",
        "\x08": "BS",
        "\x0b": "VT",
        "\x0c": "FF",
        "\r": "CR",
        "\x1b": "ESC",
        "\x7f": "DEL",
    }
    signs |= {chr(code): f"U+{code:04X}" for code in unseen}
    if "👩" in text:
        del signs["\u200d"]  # it joins two emoji
    signs |= {character: f"U+{ord(character):04X}" for character in text if "\ud800" <= character <= "\udfff"}
    return "".join(signs.get(character, character) for character in text)


@pytest.mark.slow
def test_a_turn_of_300_000_tokens_and_a_text_of_10_mb_are_read_in_parts(page: Page, tmp_path: Path):
    folder = make_page_run(tmp_path / "long", steps=1)
    encode = encoder(folder / "model")
    long = "0123456789" * 30_000
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 10_000_000 + "the end"}]
    each = outcome(episode(encode, "long", said=long, group_id="long", messages=messages))
    OutcomeFolder(folder / "trajectories").write(2, [each])
    with serving_to(page, folder) as address:
        page.open(f"{address}/#/trajectory/0/long")
        page.wait("document.querySelector('.tokens.window [data-testid=token]')")
        assert page.evaluate("document.querySelectorAll('[data-testid=token]').length") < 4_000
        page.evaluate("document.querySelector('.tokens.window').focus()")
        page.press("End")
        page.wait("document.querySelector('.inspector')?.textContent.includes('sampled token 300000')")
        assert "control token" in text_of(page, ".inspector")
        press_button(page, ".more button", "Show all")
        box = "document.querySelector('.message .window')"
        page.wait(f"{box}?.getAttribute('aria-label').includes('10,000,007')")
        page.wait(f"({box}.scrollTop = 1e9) && {box}.textContent.endsWith('the end')")
        assert page.evaluate(f"{box}.textContent.length") < 200_000


@pytest.mark.slow
def test_new_steps_appear_and_the_place_in_the_table_is_kept(page: Page, tmp_path: Path):
    folder = make_page_run(tmp_path / "live", steps=12)
    with serving_to(page, folder) as address:
        page.open(f"{address}/#/overview/0")
        page.wait("document.querySelector('.runs td')?.textContent.startsWith('12')")
        page.evaluate("location.hash = '#/trajectories/0'")
        wait_rows(page, 60)
        page.evaluate("document.querySelector('[role=grid]').scrollTop = 600")
        page.wait(f"[...document.querySelectorAll('{ROW}')].some(e => e.textContent === 't8-1')")
        log = MetricsLog(folder / "metrics.jsonl", now=lambda: 0.0)
        log.on_step(13, step_metrics(13))
        log.close()
        encode = encoder(folder / "model")
        OutcomeFolder(folder / "trajectories").write(13, [outcome(episode(encode, "new", group_id="new"))])
        page.wait("document.querySelector('.found').textContent.includes('There are new')")
        assert page.evaluate("document.querySelector('[role=grid]').scrollTop") == 600
        assert "new" not in rows(page)
        press_button(page, ".found button", "There are new")
        wait_rows(page, 61)
        page.evaluate("document.querySelector('[role=grid]').scrollTop = 0")
        page.wait(f"document.querySelector('{ROW}')?.textContent === 'new'")
        page.press("o")
        page.wait("document.querySelector('.runs td')?.textContent.startsWith('13')")


@pytest.mark.slow
def test_what_is_missing_is_said(page: Page, tmp_path: Path):
    with serving_to(page, make_run(tmp_path / "begun")) as address:
        page.open(address)
        page.wait("document.body.textContent.includes('No step is finished yet')")
        page.evaluate("location.hash = '#/trajectories/0'")
        page.wait("document.body.textContent.includes('No trajectories')")
        page.evaluate("location.hash = '#/trajectory/0/nothing'")
        page.wait("document.body.textContent.includes('could not be read')")
        (said,) = page.wait_for_problem()
    assert "404" in said


@pytest.mark.slow
def test_several_runs_are_laid_over_each_other(page: Page, run: Path, tmp_path: Path):
    other = make_page_run(tmp_path / "other", steps=3, name="tries")
    with serving_to(page, run, other) as address:
        page.open(address)
        page.wait("document.querySelector('.u-over')")
        names = "[...document.querySelectorAll('.runs th bdi')].map(e => e.textContent)"
        page.expect(names, ["tries (tries)", "tries (other)"])
        labels = "document.querySelectorAll('.chart')[0]?.querySelectorAll('.legend .label').length"
        page.expect(labels, 2)
        page.click(".runs tbody tr:nth-child(2) input")
        page.expect(labels, 1)
        assert "hide=1" in page.evaluate("location.hash")


@pytest.mark.slow
def test_every_colour_can_be_read_in_light_and_in_dark(page: Page, url: str):
    """Text on each colour has a contrast of at least 4.5 to 1 (WCAG 2.1, 1.4.3)."""
    page.open(f"{url}/#/trajectory/0/t5-2")
    page.wait("document.querySelector('.tokens')")
    names = [
        "ctx",
        "miss",
        "zero",
        "fm",
        *[f"f{i}" for i in range(7)],
        *[f"s{i}" for i in range(8)],
        *[f"{side}{i}" for side in "np" for i in range(1, 5)],
    ]
    script = """names => names.map(name => {
        const token = document.querySelector('.tokens').appendChild(document.createElement('span'));
        token.className = 't ' + name; token.textContent = 'x';
        const style = getComputedStyle(token);
        const found = [style.color, style.backgroundColor, getComputedStyle(document.body).backgroundColor];
        token.remove();
        return found; })"""
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        for name, (text, own, behind) in zip(names, page.evaluate(f"({script})({json.dumps(names)})"), strict=True):
            background = behind if own.startswith("rgba") and own.endswith(", 0)") else own
            assert contrast(text, background) >= 4.5, (theme, name, text, background)


def contrast(first: str, second: str) -> float:
    """The ratio of the relative luminances of two colours such as `rgb(1, 2, 3)` (WCAG 2.1)."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(first), luminance(second)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.slow
def test_light_and_dark_follow_the_system_or_the_switch(page: Page, url: str):
    background = "getComputedStyle(document.body).backgroundColor"
    page.prefer("dark")
    page.open(url)
    page.wait("document.querySelector('.u-over')")
    dark = page.evaluate(background)
    page.prefer("light")
    page.wait(f"{background} !== '{dark}'")
    light = page.evaluate(background)
    choose(page, ".theme select", "dark")
    page.wait(f"{background} === '{dark}'")
    page.open(f"{url}/?again")
    page.wait(f"{background} === '{dark}'")
    assert dark != light


@pytest.mark.slow
def test_an_exported_file_opens_from_disk_and_answers_filters_itself(page: Page, run: Path, tmp_path: Path):
    from verbatim.cli.main import main

    file = tmp_path / "run.html"
    assert main(["view", str(run), "--export", str(file), "--no-open"]) == 0
    page.open(file.as_uri())
    page.wait("document.querySelector('.u-over')")
    page.press("t")
    wait_rows(page, 30 + len(HOSTILE))
    page.press("/")
    page.type("answer of 4-")
    wait_rows(page, 4)
    page.press("Escape", "ArrowDown", "Enter")
    page.wait("document.querySelector('.crumbs b')?.textContent.startsWith('t4-')")
    page.wait("document.querySelector('[data-testid=token]')")
    page.press("g")
    page.wait("document.querySelectorAll('.tree .node').length === 5")
    assert {request.split(":")[0] for request in page.requests} <= {"file", "data", "blob"}
    assert page.evaluate("window.hacked") is None


@pytest.mark.slow
def test_an_export_says_how_many_of_the_trajectories_it_holds(page: Page, run: Path, tmp_path: Path):
    """It said how many the run has, over a table of fewer."""
    from verbatim.cli.main import main

    file = tmp_path / "run.html"
    assert main(["view", str(run), "--export", str(file), "--no-open", "--trajectories", "3"]) == 0
    page.open(file.as_uri())
    page.wait("document.querySelector('.bar .tag')")
    assert text_of(page, ".bar .tag") == f"3 of {30 + len(HOSTILE)} trajectories, exported"


@pytest.mark.slow
def test_parts_of_the_reward_stand_behind_it_and_a_colour_without_values_is_marked(page: Page, tmp_path: Path):
    folder = make_page_run(tmp_path / "parts", steps=1)
    parts = {"style": 0.5, "length": -0.25}
    scored = outcome(episode(encoder(folder / "model"), "scored", group_id="scored", reward_parts=parts))
    OutcomeFolder(folder / "trajectories").write(2, [scored])
    with serving_to(page, folder) as address:
        page.open(f"{address}/#/trajectory/0/scored")
        page.wait("document.querySelector('.facts')")
        facts = page.evaluate("[...document.querySelectorAll('.facts dt')].map(e => e.textContent)")
        assert facts[:4] == ["reward", "style", "length", "advantage"]
        marked = page.evaluate(
            "[...document.querySelectorAll('.segments .nothing')].map(e => [e.textContent, e.title])"
        )
        assert marked == [["teacher − sampler", "No teacher scored this run."]]


@pytest.mark.slow
def test_an_evaluation_says_how_much_was_played_and_its_reward_where_that_is_another_figure(page: Page, tmp_path: Path):
    played = {"examples": 5, "episodes": 10, "failed": 0, "success/low": 0.125, "success/high": 0.5}
    for name, reward, titles in (("same", 0.25, ["Evaluation"]), ("other", 0.75, ["Evaluation", "Evaluated reward"])):
        folder = make_page_run(tmp_path / name, steps=1)
        log = MetricsLog(folder / "metrics.jsonl", now=lambda: 0.0)
        log.on_eval(1, "game", {"success": 0.25, "reward/mean": reward, **played})
        log.close()
        with serving_to(page, folder) as address:
            page.open(f"{address}/#/overview/0")
            cards = "[...document.querySelectorAll('.chart')].filter(e => e.textContent.startsWith('Evaluat'))"
            page.expect(f"{cards}.map(e => e.querySelector('h3').textContent)", titles)
            said = f"{cards}.map(e => e.querySelector('.legend output')?.textContent)"
            figures = ["0.25 [0.125, 0.500], 5 examples, 10 episodes", "0.75, 5 examples, 10 episodes"]
            page.expect(said, figures[: len(titles)])
