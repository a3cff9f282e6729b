"""A strategy of the user's own is named by its import path; one that breaks the promise of samples is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from e2e.tiny_runs import workplace
from verbatim import Trajectory, Turn, build_samples
from verbatim.config import load_config
from verbatim.core.errors import ComponentError, ConfigError
from verbatim.run.tables import component_tables

MINE = """
def pairs(turns):
    "At most two turns in a sample."
    return [list(range(at, min(at + 2, len(turns)))) for at in range(0, len(turns), 2)]

def first(turns):
    return [[0]]
"""


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt_ids=prompt, completion_ids=completion, logprobs=[-1.0] * len(completion))


# Each turn's prompt is everything before it and one more token.
THREE = Trajectory(
    example_id="e", turns=(turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6])), reward=1.0, advantage=1.0
)
BROKEN = Trajectory(example_id="e", turns=(turn([1], [2]), turn([1, 9, 3], [4])), reward=1.0, advantage=1.0)


def test_a_strategy_of_ones_own_decides_which_turns_share_a_sample(tmp_path: Path):
    with workplace(tmp_path, {"my_strategies": MINE}):
        samples = build_samples(THREE, strategy="my_strategies.pairs")
        assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
        assert [np.flatnonzero(s.loss_mask).tolist() for s in samples] == [[1, 3], [5]]
        with pytest.raises(ComponentError, match=r"strategy my_strategies\.pairs joined turns across a break"):
            build_samples(BROKEN, strategy="my_strategies.pairs")
        with pytest.raises(ComponentError, match=r"strategy my_strategies\.first lost or repeated turns"):
            build_samples(THREE, strategy="my_strategies.first")


@pytest.mark.parametrize("given", ["None", "3", "[0, 1, 2]", "[['0', '1', '2']]", "[None]"])
def test_what_is_no_list_of_lists_of_places_is_refused_by_name(tmp_path: Path, given: str):
    source = f"def odd(turns):\n    return {given}\n"
    expected = r"strategy my_odd\.odd gave .*; expected lists of turn indices"
    with workplace(tmp_path, {"my_odd": source}), pytest.raises(ComponentError, match=expected):
        build_samples(THREE, strategy="my_odd.odd")


def test_it_is_looked_for_when_the_file_is_loaded(tmp_path: Path):
    with workplace(tmp_path, {"my_strategies": MINE}):
        Path("run.toml").write_text('[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
        option = "--orchestrator.trajectory-strategy"
        config = load_config("run.toml", [option, "my_strategies.pairs"], component_tables())
        assert config.orchestrator.trajectory_strategy == "my_strategies.pairs"
        with pytest.raises(ConfigError, match=r"my_strategies .* has no 'pair'; did you mean \"pairs\""):
            load_config("run.toml", [option, "my_strategies.pair"], component_tables())
