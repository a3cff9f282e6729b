"""Every key of a TOML text has its line."""

from __future__ import annotations

from verbatim.config.key_locations import line_numbers

TEXT = """# a comment
seed = 1
model.name = "x"

[orchestrator]
prompt = '''
[not a table]
key = 1
'''
filters = [
    { type = "a" },
    { type = "b", n = 2 },
]
[[orchestrator.train.env]]
id = "first"
[orchestrator.train.env.sampling]
top_k = 3
[[orchestrator.train.env]]
id = "second"
"""


def test_keys_and_tables_have_their_lines():
    lines = line_numbers(TEXT)
    assert lines[("seed",)] == 2
    assert lines[("model", "name")] == 3
    assert lines[("orchestrator",)] == 5
    assert lines[("orchestrator", "prompt")] == 6


def test_text_inside_a_multi_line_string_is_no_key():
    assert ("not a table",) not in line_numbers(TEXT)
    assert ("orchestrator", "key") not in line_numbers(TEXT)


def test_elements_of_a_multi_line_list_have_the_line_of_their_statement():
    assert line_numbers(TEXT)[("orchestrator", "filters", 1, "n")] == 10


def test_tables_inside_a_list_of_tables_belong_to_its_last_element():
    lines = line_numbers(TEXT)
    assert lines[("orchestrator", "train", "env", 0, "sampling", "top_k")] == 17
    assert lines[("orchestrator", "train", "env", 1)] == 18
    assert lines[("orchestrator", "train", "env", 1, "id")] == 19


def test_windows_line_ends_count_as_one_line():
    assert line_numbers("a = 1\r\nb = 2\r\n")[("b",)] == 2
