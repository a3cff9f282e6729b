"""What the chat protocols share: the fields of every request, and the form of errors."""

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
    """A chat protocol: pure functions."""

    options: Options = field(default_factory=Options)
    """Fields that are let pass."""

    name: ClassVar[str]
    """What requests call it in `ChatRequest.protocol`."""
    fields: ClassVar[Fields]
    """What becomes of each field of a request."""
    max_tokens: ClassVar[Sequence[str]]
    """Names of the limit of tokens, the strongest first."""

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """The request in a body.

        Args:
            body: The JSON object.
            headers: By lower-case name.

        Raises:
            BadField: a field that is invalid, or that cannot be honoured.
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
        """What is this protocol's own: the conversation, the tools, and how it wants the answer."""

    @abstractmethod
    def answer(self, request: ChatRequest, replies: Sequence[ChatReply], stamp: Stamp) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def stream(self, request: ChatRequest, stamp: Stamp) -> ChatStream:
        """The writer of a streamed answer."""

    def error(self, status: int, message: str, field: str = "", kind: str = "") -> dict[str, Any]:
        """The body of an error, in the protocol's own form: OpenAI's, if it says no other.

        Args:
            status: HTTP status.
            message: One sentence.
            field: The field that is refused.
            kind: The error's type; "" = the protocol's own for this status.
        """
        return error_body(status, message, field, kind)
