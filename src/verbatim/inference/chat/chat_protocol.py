"""Base class of the chat protocols. It reads the fields that all protocols have."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verbatim.inference.chat.fields import (
    Fields,
    check_tool_choice,
    check_values,
    read_flag,
    read_object,
    read_sampling,
    read_session,
    read_text,
)
from verbatim.inference.chat.openai_form import error_body
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, ChatStream, Options, Stamp
from verbatim.inference.http.protocol import OURS

_OURS = Fields(honoured={"session", "seed"})


@dataclass(frozen=True)
class ChatProtocol(ABC):
    """A chat protocol: pure functions that convert between JSON bodies and records."""

    options: Options = field(default_factory=Options)
    """The fields that are accepted although they cannot be enforced, and the maximum number of replies per response."""

    name: ClassVar[str]
    """Name of the protocol, as in `ChatRequest.protocol`."""
    fields: ClassVar[Fields]
    """How each field of a request is treated."""
    max_tokens: ClassVar[Sequence[str]]
    """Possible names of the token limit; the first name that is present in the request is used."""

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """Read the request in a body.

        Args:
            body: The JSON object.
            headers: Request headers by lower-case name.

        Raises:
            BadField: a field is invalid or cannot be honoured.
        """
        check_values(body)
        passed = self.fields.check(body, self.options)
        ours = read_object(body, OURS)
        _OURS.check(ours, where=OURS)
        own = self.read_own(body)
        forced = check_tool_choice(own.tool_choice, own.tool_name, own.tools, self.options)
        return dataclasses.replace(
            own,
            model=read_text(body, "model"),
            sampling=read_sampling(body, ours, max_tokens=self.max_tokens),
            stream=read_flag(body, "stream"),
            session=read_session(ours, headers),
            unenforced=(*passed, *forced, *own.unenforced),
        )

    @abstractmethod
    def read_own(self, body: Mapping[str, Any]) -> ChatRequest:
        """Read the fields specific to this protocol: the conversation, the tools, and the format of the response."""

    @abstractmethod
    def answer(self, request: ChatRequest, replies: Sequence[ChatReply], stamp: Stamp) -> dict[str, Any]:
        """The body of a non-streamed response."""

    @abstractmethod
    def stream(self, request: ChatRequest, stamp: Stamp) -> ChatStream:
        """The writer of a streamed response."""

    def error(self, status: int, message: str, field: str = "", kind: str = "") -> dict[str, Any]:
        """The body of an error in the protocol's format, which is OpenAI's unless overridden.

        Args:
            status: HTTP status.
            message: One sentence.
            field: Name of the refused field; "" if there is none.
            kind: Type of the error; "" for the protocol's default for this status.
        """
        return error_body(status, message, field, kind)
