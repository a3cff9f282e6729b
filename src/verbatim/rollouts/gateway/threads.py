"""Matches requests to the conversations that they continue.

The messages of a session's requests form a tree: each message hangs on those before it, found by its digest. A message
that was sampled holds its turn. A request is walked from the root along its messages, one look-up for each, and
continues the last sampled message on its way; this costs time linear in the request, and none for other sessions or
other conversations. What continues no turn, or one that another request has continued already, is a branch, and has a
reason.

Example: A was sampled for the request `S U`. The request `S U A V` continues A. `S U A W`, sent while V is still being
answered, is a branch (parallel_call); so are `S U B V`, where B is not what was sampled (edited_history), and `S' U'`
(sub_agent).
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
"""Characters of an answer that is recognised inside a message: a summary that a new conversation begins with."""


class BranchReason(StrEnum):
    """Why a request does not simply go on where a conversation ended. The values are stable."""

    NEW_CONVERSATION = "new_conversation"
    """Nothing but the system prompt is known."""
    SUB_AGENT = "sub_agent"
    """The first request of another agent; or an agent goes on where another one has begun."""
    PARALLEL_CALL = "parallel_call"
    """Another request that continues the same turn is being answered."""
    SAME_PROMPT = "same_prompt"
    """A further answer to the same prompt."""
    COMPACTION = "compaction"
    """A shorter history in the place of a longer one."""
    EDITED_HISTORY = "edited_history"
    """A message is not what it was, or the client went back."""
    REASONING_STRIPPED = "reasoning_stripped"
    """An answer came back without its reasoning."""
    TOOLS_CHANGED = "tools_changed"
    """The same conversation with other tool schemas."""
    RENDERED_ANEW = "rendered_anew"
    """It goes on, but the renderer writes an earlier answer otherwise than it was sampled."""


@dataclass(eq=False, slots=True)
class Node(Generic[T]):
    """One message after those before it."""

    message: Any
    """The message; None for the root."""
    parent: Node[T] | None
    depth: int
    """Messages up to and including this one."""
    digest: bytes = b""
    """Where it hangs among its parent's children."""
    turn: T | None = None
    """What was sampled as this message."""
    tools: bytes = b""
    """Of a sampled message: the digest of the tools it was shown."""
    agent: str = ""
    """Of a sampled message: who said it."""
    children: dict[bytes, Node[T]] = field(default_factory=dict)
    bare: dict[bytes, Node[T]] = field(default_factory=dict)
    """Sampled children with reasoning, by their digests without it."""
    num_open: int = 0
    """Requests under way that continue this sampled message."""
    num_continued: int = 0
    """Turns that continue this sampled message; of one that was not sampled, those that begin behind it."""
    continued_by: tuple[str, ...] = ()
    """The agents of these turns."""
    num_answers: int = 0
    """Answers to the prompt that ends here, those under way included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Match(Generic[T]):
    """Where a request belongs. `Threads.close` has to be called for it."""

    end: Node[T]
    """Its last message."""
    known: Node[T] | None
    """The last sampled message before its end, whose turn it continues; None: it continues nothing."""
    bridges: bool
    """Whether the prompt may be built from that turn's ids: the tools are the same."""
    agent: str
    reason: BranchReason | None
    """None: it goes on where a conversation ended."""
    found: str
    """The evidence for the reason."""
    digester: Digester
    """Has digested the request: digests its answers."""
    tools: bytes
    opening: SystemPrompt

    @property
    def messages(self) -> tuple[Any, ...]:
        """The whole conversation. Messages that were there before are the ones first seen: the sampled ones as they
        were sampled, whatever the client has made of them."""
        return tuple(reversed([node.message for node in self._nodes()]))

    @property
    def turns(self) -> dict[int, T]:
        """The request's messages that were sampled, by index: their turns."""
        return {node.depth - 1: node.turn for node in self._nodes() if node.turn is not None}

    def _nodes(self) -> Iterator[Node[T]]:
        """The request's messages, the last one first."""
        node = self.end
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def num_known(self) -> int:
        """How many of them the known turn covers, its answer included."""
        return 0 if self.known is None else self.known.depth


class Threads(Generic[T]):
    """The conversations of one session.

    Args:
        restores_reasoning: Whether an answer that comes back without its reasoning is taken for the whole answer. By
            default it is another message, as it is for a server without a memory.
    """

    def __init__(self, *, restores_reasoning: bool = False) -> None:
        self._restores = restores_reasoning
        self._root: Node[T] = Node(message=None, parent=None, depth=0)
        self._agents = Agents()
        self._longest: dict[str, int] = {}
        self._seen: set[bytes] = set()
        self._last_answer = ""
        self.num_restored = 0
        """Answers that came back without their reasoning and were taken for the whole ones."""

    def match(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str = "",
        thread: str = "",
    ) -> Match[T]:
        """Find the place of a request, and keep it open until `close`.

        Args:
            messages: The request's, at least one; they are kept, and must not change.
            tools: The schemas it shows.
            agent: The agent's name, where the request says it.
            thread: What tells the client's agents apart, where the request says it.
        """
        shown, opening = tools_digest(tools), SystemPrompt(messages)
        walk = self._walk(messages)
        known = walk.known
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
        """Hang an answer under its request. Returns whether another turn has continued the same one before, or, where
        the request continues none, answered the same messages.

        Args:
            match: Of the request, still open.
            message: As it is sent to the client.
            turn: What was sampled.
        """
        digest = match.digester.digest(message)
        self._seen.add(digest.bare)
        self._agents.answered(match.agent, match.opening, match.tools, digest.bare)
        self._last_answer = text_of(message.get("content")).strip()
        node = match.end.children.get(digest.full)
        if node is None:
            node = Node(message=message, parent=match.end, depth=match.end.depth + 1, digest=digest.full)
            match.end.children[digest.full] = node
        # Of two equal answers to one prompt, the client most probably goes on with the newest.
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
        """The request is over.

        Args:
            match: Of the request.
            answered: Whether it has an answer.
            forget: Whether its messages are let go of, as far as no other request has them.
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
        known = walk.known
        if known is None:
            return self._reason_of_a_beginning(walk, agent)
        if known.tools != tools:
            return BranchReason.TOOLS_CHANGED, f"other tool schemas than those that message {known.depth - 1} was shown"
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
            return BranchReason.PARALLEL_CALL, f"another request that follows message {known.depth - 1} is under way"
        if agent == known.agent and agent not in known.continued_by and not is_answer:
            others = " and ".join(known.continued_by)
            return BranchReason.SUB_AGENT, f"{others} went on from message {known.depth - 1} before"
        if (shorter := self._shortened(walk, agent)) is not None:
            return BranchReason.COMPACTION, shorter
        if is_answer:
            return BranchReason.EDITED_HISTORY, f"message {walk.new_from}, an answer, is not what was sampled"
        return BranchReason.EDITED_HISTORY, f"message {known.depth - 1} was followed by another message before"

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
            return BranchReason.EDITED_HISTORY, f"message {walk.new_from}, an answer, is not what was sampled"
        if walk.num_kept or walk.num_moved:
            which = "the system prompt" if walk.first_new is not walk.first_said else f"message {walk.new_from}"
            return BranchReason.EDITED_HISTORY, f"{which} is new, and others are not"
        return BranchReason.NEW_CONVERSATION, "no message but the system prompt was seen before"

    def _shortened(self, walk: _Walk[T], agent: str) -> str | None:
        """What shows that a long history was replaced: fewer messages, some of which stood elsewhere before; or the
        last answer inside of a message, as a summary."""
        longest, message = self._longest.get(agent, 0), walk.first_new
        if walk.end.depth >= longest or message is None:
            return None
        summed_up = self._quotes_last(walk)
        if not walk.num_moved and not summed_up:
            return None
        return f"{walk.end.depth} messages in the place of {longest}; " + (
            "the first new one quotes the last answer"
            if summed_up
            else f"{walk.num_moved} of them stood elsewhere before"
        )

    def _quotes_last(self, walk: _Walk[T]) -> bool:
        """Whether a new message, the first but for a system prompt, has the last answer inside."""
        message = walk.first_said
        return (
            message is not None
            and len(self._last_answer) >= LONG_ANSWER
            and message.get("role") != "assistant"
            and self._last_answer in text_of(message.get("content"))
        )


@dataclass
class _Walk(Generic[T]):
    """One request's way through the tree."""

    end: Node[T]
    digester: Digester
    known: Node[T] | None = None
    new_from: int | None = None
    """The index of the first message that was not there; None: all were."""
    first_new: Mapping[str, Any] | None = None
    first_said: Mapping[str, Any] | None = None
    """The first of the new ones that is no system prompt."""
    stripped: bool = False
    """Whether that one is an answer of ours without its reasoning."""
    num_kept: int = 0
    """Messages that were there, system messages left out."""
    num_moved: int = 0
    """New messages that were seen elsewhere."""
    is_new: bool = False
    """Whether a message but a system prompt was seen nowhere."""
    answers: list[bytes] = field(default_factory=list)
    """Digests of the answers before which nothing is new."""
    added: list[bytes] = field(default_factory=list)
    our_ids: dict[str, str] = field(default_factory=dict)
    """The ids of calls as the client writes them, and as they were sent to it: clients rename them."""


def _our_ids(message: Mapping[str, Any], ours: Mapping[str, Any] | None) -> dict[str, str]:
    """The ids of a message's calls, as the client writes them, and those of the message that was sent to it."""
    pairs = zip(message.get("tool_calls") or (), (ours or {}).get("tool_calls") or (), strict=False)
    return {str(call["id"]): str(own["id"]) for call, own in pairs if call.get("id") and own.get("id")}


def _by_our_ids(message: Mapping[str, Any], our_ids: Mapping[str, str]) -> Mapping[str, Any]:
    """An answer of a tool that names its call as the message does that was sampled; any other message as it is."""
    ours = our_ids.get(str(message.get("tool_call_id") or "")) if message.get("role") == "tool" else None
    return {**message, "tool_call_id": ours} if ours else message
