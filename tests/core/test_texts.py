"""Long files and texts of exceptions are read without the rest of them."""

import pytest

from verbatim.core import texts
from verbatim.core.texts import end_of_file, error_text


@pytest.mark.parametrize(
    ("since", "most", "expected"),
    [
        (0, 100, ["aa", "bbbb", "cc"]),
        (0, 11, ["aa", "bbbb", "cc"]),  # the whole file
        (0, 8, ["bbbb", "cc"]),  # from a line's first byte on
        (0, 7, ["cc"]),  # from inside of a line, which is left out
        (0, 1, []),
        (3, 100, ["bbbb", "cc"]),
        (5, 100, ["bb", "cc"]),  # what came before is not wanted, also in the middle of a line
        (11, 100, []),
        (3, 7, ["cc"]),
    ],
)
def test_the_last_lines_are_whole(tmp_path, since, most, expected):
    (tmp_path / "log").write_bytes(b"aa\nbbbb\ncc\n")
    assert end_of_file(tmp_path / "log", since=since, most=most) == expected


def test_no_more_is_read_than_is_asked_for(tmp_path):
    """A file of a tebibyte, in which almost nothing is stored."""
    with (tmp_path / "log").open("wb") as file:
        file.seek(2**40)
        file.write(b"\nhalf a \xff letter\nthe end\n")
    assert end_of_file(tmp_path / "log", most=30)[-2:] == ["half a \ufffd letter", "the end"]


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        end_of_file(tmp_path / "log")


def test_of_a_long_text_of_an_exception_only_the_beginning_is_looked_through_for_keys(monkeypatch):
    looked_at = []
    without = texts.without_secrets
    monkeypatch.setattr(texts, "without_secrets", lambda text: looked_at.append(len(text)) or without(text))
    said = error_text(ValueError("Bearer abcdef123 " + "x" * 5_000_000), limit=200)
    assert looked_at == [65_536]
    assert said.startswith("ValueError: Bearer [redacted] xxx")
    assert said.endswith("x [cut: 4,999,829 of 5,000,029 characters]")
    assert len(said.partition(" [cut")[0]) == 200
