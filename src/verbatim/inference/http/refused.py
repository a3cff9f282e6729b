"""The refusal of a request: raised by whatever reads it, and answered in the form of its protocol."""

from __future__ import annotations


class Refused(Exception):
    """A request that is refused. Can be pickled.

    Args:
        status: HTTP status.
        message: What was found and what was expected.
        kind: The error's type or code; "" = the protocol's own for this status.
        field: The field that is refused; "" = the request as a whole.
        unknown: Whether no protocol of ours knows a field of this name.
    """

    # `args` stay those of the call, for pickle, which sets the attributes too.
    def __init__(self, status: int, message: str, kind: str = "", *, field: str = "", unknown: bool = False) -> None:
        self.status, self.message, self.kind, self.field, self.unknown = status, message, kind, field, unknown

    def __str__(self) -> str:
        return self.message

    @property
    def counted_as(self) -> str:
        """The refused field's name, for counts; "" where no field is refused."""
        return "other" if self.unknown else self.field
