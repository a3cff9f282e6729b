"""Random arguments fit the schema that they are drawn for."""

from __future__ import annotations

import random

import jsonschema
import pytest

from verbatim.inspection.envcheck.arguments import random_arguments


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1.5, "maximum": 3.5},
        {"type": "integer", "minimum": -7, "maximum": 7, "multipleOf": 3},
        {"anyOf": [True, {"type": "integer"}]},
    ],
)
def test_arguments_fit(schema):
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    for seed in range(50):
        jsonschema.validate(random_arguments(parameters, ["word"], random.Random(seed)), parameters)
