"""The byte format reads what a player may write, also out of order."""

from __future__ import annotations

import json

import numpy as np

from verbatim.inspection.envcheck.byte_chat import CALL, CALL_END, END, ByteChat


def test_a_stray_end_of_a_call_before_a_call_is_left_out():
    call = json.dumps({"name": "look", "arguments": {"at": "Bonn"}}).encode()
    ids = np.array([CALL_END, CALL, *call, CALL_END, END], dtype=np.int32)
    read = ByteChat().parse_response(ids)
    assert [(one.name, one.arguments) for one in read.tool_calls] == [("look", {"at": "Bonn"})]
    assert read.content == ""
