"""Names that other frameworks have are answered with what they are called here, and every answer can be typed."""

from __future__ import annotations

import re

import pytest

from verbatim.config import resolve
from verbatim.config.known_names import _ANSWERS, known_elsewhere
from verbatim.config.schema import ComponentConfig
from verbatim.core.errors import ComponentError
from verbatim.run.tables import component_tables


def refusal(what: str, name: str) -> str:
    tables = component_tables()
    table, where = (tables.losses, "trainer.loss") if what == "loss" else (tables.advantages, "orchestrator.advantage")
    with pytest.raises(ComponentError) as error:
        resolve(ComponentConfig(type=name), table, what=what, where=where)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "loss", "advantage"),
    [
        ("grpo", "ppo", "normalized"),
        ("GRPO", "ppo", "normalized"),
        ("grpo_loss", "ppo", "normalized"),
        ("dapo", "ppo", "normalized"),
        ("dr_grpo", "ppo", "default"),
        ("Dr-GRPO", "ppo", "default"),
        ("drgrpo", "ppo", "default"),
        ("reinforce", "tis", "rloo"),
        ("reinforce++", "tis", "default"),
        ("ipa_chunk", "ipa", "chunk_returns"),
        ("step_reinforce", "ipa", "chunk_returns"),
    ],
)
@pytest.mark.parametrize("what", ["loss", "advantage"])
def test_a_name_of_another_framework_is_answered_with_loss_and_advantage(what, name, loss, advantage):
    said = refusal(what, name)
    assert f"there is no {what} {name!r}: here it is " in said
    answer = said.partition("here it is ")[2].partition(". There are ")[0]
    assert re.search(rf'"{loss}".* under \[trainer.loss\]', answer)
    assert re.search(rf'"{advantage}".* under \[orchestrator.advantage\]', answer)
    assert "gspo" not in answer


def test_a_misspelt_name_still_gets_the_nearest_one():
    assert 'did you mean "cispo"?' in refusal("loss", "cispoo")
    assert "here it is" not in refusal("loss", "cispoo")


def test_nothing_is_said_of_other_components():
    assert known_elsewhere("filter", "grpo") is None


def test_every_answer_names_what_there_is():
    tables = component_tables()
    for answer in set(_ANSWERS.values()):
        for name in re.findall(r'"(\w+)"', answer.replace('training_mode = "opd"', "")):
            assert name in tables.losses or name in tables.advantages, answer
