"""The refusal of a request: raised anywhere while it is read, and sent in the format of its protocol."""

from __future__ import annotations


class Refused(Exception):
    """A request is refused. Can be pickled: render processes raise it.

    Args:
        status: HTTP status.
        message: What was found and what was expected.
        kind: The error's type or code; "" = the protocol's default for this status.
        field: Name of the refused field; "" = the request as a whole.
        unknown: True if none of our protocols has a field of this name.
    """

    # Does not call `super().__init__`: BaseException.__new__ has stored the positional arguments in `args`, with which
    # pickle calls the class again before it restores the attributes.
    def __init__(self, status: int, message: str, kind: str = "", *, field: str = "", unknown: bool = False) -> None:
        self.status, self.message, self.kind, self.field, self.unknown = status, message, kind, field, unknown

    def __str__(self) -> str:
        return self.message

    @property
    def counted_as(self) -> str:
        """The refused field's name for counters; "other" for an unknown field, since clients could send any number of
        names; "" if no field is refused."""
        return "other" if self.unknown else self.field
