"""Tests, run with `pytest`, that the program works. Scripted responses take the place of a model."""

import json
from types import SimpleNamespace

import agent


def playing(*answers: tuple[str, dict]) -> SimpleNamespace:
    """Return a client whose model makes these calls, one call per response."""
    left = iter(answers)

    def create(**request: object) -> SimpleNamespace:
        name, arguments = next(left)
        function = SimpleNamespace(name=name, arguments=json.dumps(arguments))
        message = SimpleNamespace(content="", tool_calls=[SimpleNamespace(id="call", function=function)])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def test_the_right_care_earns_one() -> None:
    for state, way in agent.RIGHT_CARE.items():
        assert agent.play(playing(("look", {}), ("care", {"way": way})), state) == 1.0
        assert agent.play(playing(("care", {"way": "sing"})), state) == 0.0
