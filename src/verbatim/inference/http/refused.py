"""The refusal of a request. It is raised anywhere while a request is read, and sent in the format of its protocol."""

from __future__ import annotations


class Refused(Exception):
    """A request is refused. Can be pickled, because render processes raise it.

    Args:
        status: HTTP status.
        message: What was found and what was expected.
        kind: Type or code of the error; "" for the protocol's default for this status.
        field: Name of the refused field; "" for the request as a whole.
        unknown: True if none of our protocols has a field of this name.
    """

    # Does not call `super().__init__`, because BaseException.__new__ has already stored the positional arguments in
    # `args`. Pickle calls the class with them before it restores the attributes.
    def __init__(self, status: int, message: str, kind: str = "", *, field: str = "", unknown: bool = False) -> None:
        self.status, self.message, self.kind, self.field, self.unknown = status, message, kind, field, unknown

    def __str__(self) -> str:
        return self.message

    @property
    def counted_as(self) -> str:
        """The refused field's name for counters; "" if no field is refused. Unknown fields are counted as "other",
        because clients could send any number of names."""
        return "other" if self.unknown else self.field
