"""Matches requests to the conversations that they continue.

The messages of a session's requests form a tree: a message is a child of the message before it, and its digest is the
key. The node of a sampled message holds its turn. Matching walks from the root along the request's messages, with one
look-up per message, and the request continues the last sampled message on this path. The cost is linear in the length
of the request, and does not depend on other sessions and conversations. A request that continues no turn, or a turn
that another request has already continued, is a branch, and gets a reason.

Example: The answer A was sampled for the request `S U`. The request `S U A V` continues A. Branches are `S U A W`, if
it is sent while `S U A V` is still being answered (parallel_call); `S U B V`, where B is not the sampled answer
(history_edited); and `S' U'` (sub_agent).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from verbatim.rollouts.gateway.agents import Agents, SystemPrompt
from verbatim.rollouts.gateway.canonical import Digester, identity_of, text_of, tools_digest

T = TypeVar("T")

LONG_ANSWER = 24
"""Minimum length, in characters, of an answer that is recognised when a later message, such as a summary, quotes it.
Shorter answers ("Yes.") would match by chance."""


class BranchReason(StrEnum):
    """The reason why a request does not continue the end of a conversation. The values never change between
    versions."""

    NEW_CONVERSATION = "new_conversation"
    """No message except the system prompt was seen before."""
    SUB_AGENT = "sub_agent"
    """The request is the first request of a new agent, or its agent continues a turn that other agents continued
    before."""
    PARALLEL_CALL = "parallel_call"
    """Another request that continues the same turn is still being answered."""
    SAME_PROMPT = "same_prompt"
    """The prompt has been answered before, and this is a further answer to it."""
    COMPACTION = "compaction"
    """A shorter history replaces a longer history."""
    HISTORY_EDITED = "history_edited"
    """A message was changed, or the client went back to an earlier point."""
    REASONING_STRIPPED = "reasoning_stripped"
    """The client sent an answer back without its reasoning."""
    TOOLS_CHANGED = "tools_changed"
    """The conversation is the same, but the request has different tool schemas."""
    RENDERED_AGAIN = "rendered_again"
    """The conversation continues, but the renderer writes an earlier answer differently from how it was sampled."""


@dataclass(eq=False, slots=True)
class Node(Generic[T]):
    """One message in the tree, in the context of all messages before it."""

    message: Any
    """The message, or None for the root of the tree."""
    parent: Node[T] | None
    depth: int
    """Number of messages on the path from the root, up to and including this one."""
    digest: bytes = b""
    """The message's key in the `children` of the parent node."""
    turn: T | None = None
    """The turn in which the message was sampled, or None if a client wrote it."""
    tools: bytes = b""
    """The digest of the tools that were shown, if the message was sampled."""
    agent: str = ""
    """The agent's name, if the message was sampled."""
    children: dict[bytes, Node[T]] = field(default_factory=dict)
    bare: dict[bytes, Node[T]] = field(default_factory=dict)
    """Children that were sampled with reasoning, keyed by the digests that their messages have without the
    reasoning."""
    num_open: int = 0
    """The number of requests in flight that continue this message, if it was sampled."""
    num_continued: int = 0
    """If the message was sampled, the number of turns that continue it. Otherwise, the number of turns whose prompt
    ends with this message and continues no turn."""
    continued_by: tuple[str, ...] = ()
    """The agents of the turns counted in `num_continued`."""
    num_answers: int = 0
    """Number of answers to the prompt that ends with this message, including answers in flight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Match(Generic[T]):
    """The place of a request in the tree. The caller must pass the match to `Threads.close` when the request is
    over."""

    end: Node[T]
    """The node of the request's last message."""
    known: Node[T] | None
    """The node of the last sampled message in the request, whose turn the request continues; None if the request
    continues no turn."""
    bridges: bool
    """True if the prompt may be bridged from the continued turn, because the tools are unchanged."""
    agent: str
    """The agent's name, which the client gave or which was inferred."""
    reason: BranchReason | None
    """The reason why the request is a branch, or None if the request continues the end of a conversation."""
    found: str
    """The evidence for `reason`, in words."""
    digester: Digester
    """The digester that has read the request's messages. It is needed to digest the answers to the request."""
    tools: bytes
    """Digest of the request's tools."""
    opening: SystemPrompt
    """The request's system prompt."""

    @property
    def messages(self) -> tuple[Any, ...]:
        """All messages of the request, each as it was first seen. An answer is therefore as it was sampled, even if the
        client has rewritten it."""
        return tuple(reversed([node.message for node in self._nodes()]))

    @property
    def turns(self) -> dict[int, T]:
        """The turns of the request's sampled messages, keyed by the index of the message."""
        return {node.depth - 1: node.turn for node in self._nodes() if node.turn is not None}

    def _nodes(self) -> Iterator[Node[T]]:
        """Iterate over the request's nodes, from the last message to the first."""
        node = self.end
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def num_known(self) -> int:
        """The number of leading messages that the continued turn covers, including its answer."""
        return 0 if self.known is None else self.known.depth


class Threads(Generic[T]):
    """The conversations of one session.

    Args:
        restores_reasoning: True to treat an answer that a client sends back without its reasoning as the original
            answer. By default it is a different message, as it would be to a stateless server.
    """

    def __init__(self, *, restores_reasoning: bool = False) -> None:
        self._restores = restores_reasoning
        self._root: Node[T] = Node(message=None, parent=None, depth=0)
        self._agents = Agents()
        self._longest: dict[str, int] = {}
        self._seen: set[bytes] = set()
        self._last_answer = ""
        self.num_restored = 0
        """Number of answers that a client sent back without their reasoning and whose reasoning was restored."""

    def match(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str = "",
        thread: str = "",
    ) -> Match[T]:
        """Find the place of a request in the tree, and count the request as open until `close`.

        Args:
            messages: The request's messages, at least one. They are kept, so the caller must not modify them.
            tools: The tool schemas that the request shows to the model.
            agent: The agent's name; "" if the request has none.
            thread: The client's identifier of the agent or conversation; "" if the request has none.
        """
        shown, opening = tools_digest(tools), SystemPrompt(messages)
        walk = self._walk(messages)
        known = walk.known
        # The agent is identified by its given name, else by the client's thread id, else as the agent of the continued
        # turn. Only a request that has none of these is identified by its system prompt.
        continued = known.agent if known is not None and not thread else ""
        if not (name := agent or continued):
            same = None if thread else self._agents.whose_clock_went_on(opening, shown, walk.answers)
            name = same or self._agents.name_of(thread.encode() or identity_of(messages))
        reason, found = self._reason(walk, name, shown)
        if known is not None:
            known.num_open += 1
        walk.end.num_answers += 1
        return Match(
            end=walk.end,
            known=known,
            bridges=known is not None and known.tools == shown,
            agent=name,
            reason=reason,
            found=found,
            digester=walk.digester,
            tools=shown,
            opening=opening,
        )

    def answer(self, match: Match[T], message: Mapping[str, Any], turn: T) -> bool:
        """Add an answer to the tree.

        Args:
            match: The request's match, which is still open.
            message: The answer as sent to the client.
            turn: The sampled turn.

        Returns:
            True if another turn has already continued the turn that the request continues. If the request continues no
            turn: True if another turn has already answered the same messages.
        """
        digest = match.digester.digest(message)
        self._seen.add(digest.bare)
        self._agents.answered(match.agent, match.opening, match.tools, digest.bare)
        self._last_answer = text_of(message.get("content")).strip()
        node = match.end.children.get(digest.full)
        if node is None:
            node = Node(message=message, parent=match.end, depth=match.end.depth + 1, digest=digest.full)
            match.end.children[digest.full] = node
        # If a prompt has two equal answers, a client most likely continues the newer one. But an answer that has been
        # continued keeps its turn, because the ids of that turn are in later prompts.
        if node.turn is None or not (node.num_open or node.num_continued):
            node.message, node.turn, node.tools, node.agent = message, turn, match.tools, match.agent
        if digest.bare != digest.full:
            match.end.bare[digest.bare] = node
        self._longest[match.agent] = max(self._longest.get(match.agent, 0), node.depth)
        before = match.known or match.end
        before.num_continued += 1
        if match.agent not in before.continued_by:
            before.continued_by = (*before.continued_by, match.agent)
        return before.num_continued > 1

    def close(self, match: Match[T], *, answered: bool, forget: bool = False) -> None:
        """End a request that `match` has opened.

        Args:
            match: The request's match.
            answered: True if the request was answered.
            forget: True to drop the request's messages from the tree, except messages that other requests share.
        """
        if match.known is not None:
            match.known.num_open -= 1
        if not answered:
            match.end.num_answers -= 1
        node = match.end
        while forget and node.parent is not None and not (node.children or node.turn is not None or node.num_answers):
            del node.parent.children[node.digest]
            node = node.parent

    def _walk(self, messages: Sequence[Mapping[str, Any]]) -> _Walk[T]:
        digester = Digester()
        walk = _Walk(end=self._root, digester=digester)
        for index, message in enumerate(messages):
            digest = digester.digest(message)
            node, other = walk.end, walk.end.children.get(digest.full)
            stripped = node.bare.get(digest.bare) if other is None and digest.bare == digest.full else None
            if stripped is not None and self._restores:
                self.num_restored += 1
                other = stripped
            is_system = message.get("role") in ("system", "developer")
            walk.num_kept += other is not None and not is_system
            if other is None:
                if walk.new_from is None:
                    walk.new_from, walk.stripped = index, stripped is not None
                walk.is_new |= digest.bare not in self._seen and not is_system
                walk.num_moved += digest.bare in self._seen and not is_system
                named = _by_our_ids(message, walk.our_ids)
                other = Node(message=named, parent=node, depth=index + 1, digest=digest.full)
                node.children[digest.full] = other
                walk.added.append(digest.bare)
            if not walk.is_new and message.get("role") == "assistant":
                walk.answers.append(digest.bare)
            if message.get("tool_calls"):
                walk.our_ids.update(_our_ids(message, other.message))
            walk.end = other
            if other.turn is not None:
                walk.known = other
        self._seen.update(walk.added)
        if walk.new_from is not None:
            new = messages[walk.new_from :]
            said = (message for message in new if message.get("role") not in ("system", "developer"))
            walk.first_new, walk.first_said = new[0], next(said, None)
        return walk

    def _reason(self, walk: _Walk[T], agent: str, tools: bytes) -> tuple[BranchReason | None, str]:
        # The first reason that applies is returned, so the order matters: reasons with definite evidence come first,
        # and HISTORY_EDITED, which fits any changed history, comes last.
        known = walk.known
        if known is None:
            return self._reason_of_a_beginning(walk, agent)
        if known.tools != tools:
            return BranchReason.TOOLS_CHANGED, f"the tool schemas differ from those of message {known.depth - 1}"
        if walk.stripped:
            return BranchReason.REASONING_STRIPPED, f"message {walk.new_from} came back without its reasoning"
        if not known.num_continued and not known.num_open:
            return None, ""
        if walk.end.num_answers:
            return BranchReason.SAME_PROMPT, "the same messages were sent before"
        if agent not in self._longest:
            return BranchReason.SUB_AGENT, f"the first request of agent {agent}"
        is_answer = walk.first_new is not None and walk.first_new.get("role") == "assistant"
        if known.num_open and not is_answer:
            return BranchReason.PARALLEL_CALL, f"another request that follows message {known.depth - 1} is in flight"
        if agent == known.agent and agent not in known.continued_by and not is_answer:
            others = " and ".join(known.continued_by)
            return BranchReason.SUB_AGENT, f"{others} continued message {known.depth - 1} before"
        if (shorter := self._shortened(walk, agent)) is not None:
            return BranchReason.COMPACTION, shorter
        if is_answer:
            return BranchReason.HISTORY_EDITED, f"message {walk.new_from}, an answer, differs from the sampled one"
        return BranchReason.HISTORY_EDITED, f"message {known.depth - 1} was followed by another message before"

    def _reason_of_a_beginning(self, walk: _Walk[T], agent: str) -> tuple[BranchReason | None, str]:
        if not self._longest and not walk.end.num_answers:
            return None, ""
        if walk.end.num_answers:
            return BranchReason.SAME_PROMPT, "the same messages were sent before"
        if walk.stripped:
            return BranchReason.REASONING_STRIPPED, f"message {walk.new_from} came back without its reasoning"
        if agent not in self._longest:
            return BranchReason.SUB_AGENT, f"the first request of agent {agent}"
        if (shorter := self._shortened(walk, agent)) is not None:
            return BranchReason.COMPACTION, shorter
        if walk.num_kept and walk.first_new is not None and walk.first_new.get("role") == "assistant":
            return BranchReason.HISTORY_EDITED, f"message {walk.new_from}, an answer, differs from the sampled one"
        if walk.num_kept or walk.num_moved:
            which = "the system prompt" if walk.first_new is not walk.first_said else f"message {walk.new_from}"
            return BranchReason.HISTORY_EDITED, f"{which} is new, but other messages are not"
        return BranchReason.NEW_CONVERSATION, "no message except the system prompt was seen before"

    def _shortened(self, walk: _Walk[T], agent: str) -> str | None:
        """Return the evidence that a shorter history has replaced a longer history, or None. There is evidence if the
        request has fewer messages, and either some of these messages were at other places before, or one of them quotes
        the last answer, as a summary does."""
        longest, message = self._longest.get(agent, 0), walk.first_new
        if walk.end.depth >= longest or message is None:
            return None
        summed_up = self._quotes_last(walk)
        if not walk.num_moved and not summed_up:
            return None
        return f"{walk.end.depth} messages replace {longest}; " + (
            "the first new one quotes the last answer"
            if summed_up
            else f"{walk.num_moved} of them were elsewhere before"
        )

    def _quotes_last(self, walk: _Walk[T]) -> bool:
        """Return True if the first new message other than a system prompt contains the last answer."""
        message = walk.first_said
        return (
            message is not None
            and len(self._last_answer) >= LONG_ANSWER
            and message.get("role") != "assistant"
            and self._last_answer in text_of(message.get("content"))
        )


@dataclass
class _Walk(Generic[T]):
    """The path of one request through the tree."""

    end: Node[T]
    digester: Digester
    known: Node[T] | None = None
    new_from: int | None = None
    """Index of the first message that is not in the tree, or None if all messages are in the tree."""
    first_new: Mapping[str, Any] | None = None
    """The message at the index `new_from`."""
    first_said: Mapping[str, Any] | None = None
    """The first new message that is not a system prompt."""
    stripped: bool = False
    """True if `first_new` is a sampled answer without its reasoning."""
    num_kept: int = 0
    """Number of messages found in the tree, not counting system messages."""
    num_moved: int = 0
    """Number of new messages that were seen at a different place before."""
    is_new: bool = False
    """True once the walk has met a message, other than a system prompt, that was never seen in this session before."""
    answers: list[bytes] = field(default_factory=list)
    """Digests of the assistant messages up to the first message that was never seen before."""
    added: list[bytes] = field(default_factory=list)
    """Digests of the new messages. They are added to `_seen` only after the walk, so that a request does not match
    itself."""
    our_ids: dict[str, str] = field(default_factory=dict)
    """The ids of tool calls as they were sent to the client, keyed by the ids that the client uses. They can differ,
    because clients rename ids."""


def _our_ids(message: Mapping[str, Any], ours: Mapping[str, Any] | None) -> dict[str, str]:
    """Map the ids that the client uses for a message's calls to the ids that were sent to the client."""
    pairs = zip(message.get("tool_calls") or (), (ours or {}).get("tool_calls") or (), strict=False)
    return {str(call["id"]): str(own["id"]) for call, own in pairs if call.get("id") and own.get("id")}


def _by_our_ids(message: Mapping[str, Any], our_ids: Mapping[str, str]) -> Mapping[str, Any]:
    """Replace the call id in a tool message by the id that was sent to the client, so that the rendered prompt is
    consistent. Other messages are returned unchanged."""
    ours = our_ids.get(str(message.get("tool_call_id") or "")) if message.get("role") == "tool" else None
    return {**message, "tool_call_id": ours} if ours else message
