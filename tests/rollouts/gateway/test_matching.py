"""Requests are matched to the conversations that they continue, however a client writes them down."""

import sys

import pytest

from verbatim.gateway import canonical
from verbatim.gateway.canonical import canonical_arguments, digests, text_of
from verbatim.gateway.threads import BranchReason, Threads

SYSTEM, HELLO = {"role": "system", "content": "You help."}, {"role": "user", "content": "hello"}
MORE, OTHER = {"role": "user", "content": "more"}, {"role": "user", "content": "something else"}


def said(content="", *calls, **more):
    message = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


def asked(threads, messages, answer=None, turn=None, **options):
    """Match a request; answer it at once where an answer is given."""
    match = threads.match(messages, **options)
    if answer is not None:
        threads.answer(match, answer, turn)
        threads.close(match, answered=True)
    return match


class TestDigests:
    CALL = said("", ("add", {"a": 1, "b": 2}))

    @pytest.mark.parametrize(
        "again",
        [
            said(None, ("add", '{"a": 1, "b": 2}')),
            said([], ("add", ' {"b":2,\n "a":1.0} ')),
            {**said("", ("add", {"b": 2, "a": 1})), "refusal": None, "audio": None, "annotations": []},
            {
                "role": "assistant",
                "reasoning_content": "",
                "tool_calls": [{"id": "toolu_9", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}],
            },
            said([{"type": "text", "text": ""}], ("add", '{"a":1,"b":2}')),
        ],
    )
    def test_a_harmless_rewriting_has_the_same_digest(self, again):
        assert digests([self.CALL]) == digests([again])

    @pytest.mark.parametrize(
        "other",
        [
            said("", ("add", {"a": 1, "b": True})),
            said("", ("add", {"a": 1, "b": "2"})),
            said("", ("sub", {"a": 1, "b": 2})),
            said("so", ("add", {"a": 1, "b": 2})),
            said("", ("add", {"a": 1, "b": 2}), ("add", {"a": 1, "b": 2})),
            {**said("", ("add", {"a": 1, "b": 2})), "role": "user"},
        ],
    )
    def test_another_message_has_another_digest(self, other):
        assert digests([self.CALL]) != digests([other])

    def test_the_name_of_who_speaks_counts(self):
        anna, bob, unnamed = ({"role": "user", "content": "hello", "name": name} for name in ("anna", "bob", ""))
        assert digests([anna]) != digests([bob]) != digests([unnamed]) == digests([HELLO])
        assert digests([said("hi", name="anna")]) != digests([said("hi", name="bob")])

    def test_an_answer_is_told_by_the_place_of_its_call(self):
        def conversation(first, second):
            calls = said("", ("add", {}), ("sub", {}))
            calls["tool_calls"][0]["id"], calls["tool_calls"][1]["id"] = first, second
            return [calls, {"role": "tool", "tool_call_id": first, "content": "3"}]

        named, renamed = digests(conversation("x", "y")), digests(conversation("call_8", "call_9"))
        swapped = digests([conversation("x", "y")[0], {"role": "tool", "tool_call_id": "y", "content": "3"}])
        assert named == renamed
        assert named[1] != swapped[1]

    def test_reasoning_is_in_the_full_digest_only(self):
        (thought,), (plain,) = digests([said("4", reasoning_content="2+2")]), digests([said("4")])
        assert thought.bare == plain.bare == plain.full != thought.full

    def test_parts_are_one_text_and_white_space_around_an_answer_does_not_count(self):
        assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
        assert digests([said(" so\n")]) == digests([said("so")])
        assert digests([{"role": "user", "content": " so"}]) != digests([{"role": "user", "content": "so"}])

    def test_text_that_is_no_object_stays_text(self):
        assert canonical_arguments('{"a": ') == '{"a":'
        assert canonical_arguments("[" * 5000) == "[" * 5000
        assert canonical_arguments("") == canonical_arguments({}) == "{}"
        assert canonical_arguments('{"INVALID_JSON": "{\\"a\\": "}') == '{"a":'
        assert canonical_arguments({"INVALID_JSON": 1}) == '{"INVALID_JSON":1}'


class TestThreads:
    def test_a_conversation_continues_its_last_answer(self):
        threads = Threads()
        first = asked(threads, [SYSTEM, HELLO], said("hi"), turn=0)
        second = asked(threads, [SYSTEM, HELLO, said(" hi "), MORE], said("yes"), turn=1)
        third = asked(threads, [SYSTEM, HELLO, said("hi"), MORE, said("yes"), MORE])
        assert (first.known, first.reason, first.agent) == (None, None, "main")
        assert (second.known.turn, second.num_known, second.reason, second.bridges) == (0, 3, None, True)
        assert (third.known.turn, third.num_known, third.reason) == (1, 5, None)
        assert [m["content"] for m in third.messages] == ["You help.", "hello", "hi", "more", "yes", "more"]

    def test_messages_are_those_that_were_sampled(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi", ("add", {"a": 1})), turn=0)
        again = said("hi", ("add", '{"a":1.0}'))
        match = asked(threads, [HELLO, again, {"role": "tool", "tool_call_id": "call_0", "content": "2"}])
        assert match.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}

    def test_another_system_prompt_is_another_agent(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("hi"), turn=0)
        helper = asked(threads, [{"role": "system", "content": "You search."}, HELLO], said("found"), turn=1)
        again = asked(threads, [{"role": "developer", "content": "You search."}, MORE], said("ok"), turn=2)
        named = asked(threads, [SYSTEM, OTHER], said("ok"), turn=3, agent="critic")
        assert (helper.agent, helper.reason) == ("sub/1", BranchReason.SUB_AGENT)
        assert (again.agent, again.reason) == ("sub/1", BranchReason.NEW_CONVERSATION)
        assert (named.agent, named.reason) == ("critic", BranchReason.SUB_AGENT)

    def test_a_clients_threads_tell_its_agents_apart(self):
        """Also those with one system prompt, and one that begins with the history of another."""
        threads, spawning = Threads(), said("", ("spawn", {}))
        history = [SYSTEM, HELLO, spawning, {"role": "tool", "tool_call_id": "call_0", "content": "done"}]
        asked(threads, [SYSTEM, HELLO], spawning, turn=0, thread="a")
        helper = asked(threads, [SYSTEM, MORE], said("found"), turn=1, thread="b")
        goes_on = asked(threads, history, said("ok"), turn=2, thread="a")
        again = asked(threads, [SYSTEM, MORE, said("found"), OTHER], said("yes"), turn=3, thread="b")
        forked = asked(threads, [*history[:3], MORE], said("so"), turn=4, thread="c")
        named = asked(threads, [SYSTEM, MORE, said("found"), OTHER, said("yes"), MORE], thread="b", agent="critic")
        assert [m.agent for m in (helper, goes_on, again, forked, named)] == [
            "sub/1",
            "main",
            "sub/1",
            "sub/2",
            "critic",
        ]
        assert [m.reason for m in (helper, goes_on, again, forked, named)] == [
            BranchReason.SUB_AGENT,
            None,
            None,
            BranchReason.SUB_AGENT,
            None,
        ]
        assert forked.known.turn == 0

    def test_an_agent_that_goes_on_where_another_has_begun_has_edited_nothing(self):
        threads, spawning, no = Threads(), said("", ("spawn", {})), {"role": "user", "content": "no"}
        asked(threads, [SYSTEM, HELLO], spawning, turn=0, thread="a")
        forked = asked(threads, [SYSTEM, HELLO, spawning, MORE], said("found"), turn=1, thread="b")
        goes_on = asked(threads, [SYSTEM, HELLO, spawning, OTHER], said("ok"), turn=2, thread="a")
        edited = asked(threads, [SYSTEM, HELLO, spawning, no], said("so"), turn=3, thread="a")
        assert [(m.agent, m.reason) for m in (forked, goes_on, edited)] == [
            ("sub/1", None),
            ("main", BranchReason.SUB_AGENT),
            ("main", BranchReason.EDITED_HISTORY),
        ]
        assert goes_on.found == "sub/1 went on from message 2 before"

    def test_a_continued_conversation_keeps_its_agent(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("hi"), turn=0, agent="critic")
        assert asked(threads, [SYSTEM, HELLO, said("hi"), MORE]).agent == "critic"

    def test_two_requests_after_one_answer_are_parallel_while_both_are_open(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        one = threads.match([HELLO, said("hi"), MORE])
        two = threads.match([HELLO, said("hi"), OTHER])
        assert (one.reason, two.reason) == (None, BranchReason.PARALLEL_CALL)
        assert one.known is two.known
        assert not threads.answer(one, said("1"), 1)
        assert threads.answer(two, said("2"), 2)

    def test_a_request_that_was_cut_off_leaves_no_trace(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        threads.close(threads.match([HELLO, said("hi"), MORE]), answered=False)
        assert asked(threads, [HELLO, said("hi"), OTHER]).reason is None
        assert asked(Threads(), [HELLO]).reason is None

    def test_a_second_answer_to_the_same_prompt(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        assert asked(threads, [HELLO], said("ho"), turn=1).reason is BranchReason.SAME_PROMPT
        assert asked(threads, [HELLO, said("hi"), MORE]).known.turn == 0
        assert asked(threads, [HELLO, said("ho"), MORE]).known.turn == 1

    def test_of_equal_answers_the_newest_is_continued(self):
        threads = Threads()
        for turn in (0, 1):
            asked(threads, [HELLO], said("hi"), turn=turn)
        assert asked(threads, [HELLO, said("hi"), MORE]).known.turn == 1

    def test_of_equal_answers_the_one_that_was_continued_stays(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        asked(threads, [HELLO, said("hi"), MORE], said("a"), turn=1)
        asked(threads, [HELLO], said("hi"), turn=2)
        assert asked(threads, [HELLO, said("hi"), MORE, said("a"), MORE]).known.turn == 1
        assert asked(threads, [HELLO, said("hi"), OTHER]).known.turn == 0

    def test_an_edited_answer_is_a_branch_after_the_last_one_that_was_sampled(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        asked(threads, [HELLO, said("hi"), MORE], said("yes"), turn=1)
        match = asked(threads, [HELLO, said("hi"), MORE, said("no"), MORE])
        assert (match.known.turn, match.num_known, match.reason) == (0, 2, BranchReason.EDITED_HISTORY)
        assert "message 3, an answer, is not what was sampled" in match.found

    def test_a_first_answer_that_is_written_as_text_is_an_edited_history(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("", ("add", {})), turn=0)
        match = asked(threads, [SYSTEM, HELLO, said("Calling tools: add"), MORE])
        assert (match.known, match.reason) == (None, BranchReason.EDITED_HISTORY)
        assert match.found == "message 2, an answer, is not what was sampled"

    def test_going_back_is_an_edited_history(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        asked(threads, [HELLO, said("hi"), MORE], said("yes"), turn=1)
        assert asked(threads, [HELLO, said("hi"), OTHER]).reason is BranchReason.EDITED_HISTORY

    def test_a_shorter_history_in_the_place_of_a_longer_one_is_a_compaction(self):
        threads = Threads()
        history = [SYSTEM, HELLO]
        for turn in range(4):
            answer = said(f"answer {turn}")
            asked(threads, history, answer, turn=turn)
            history = [*history, answer, {"role": "user", "content": f"question {turn}"}]
        recent = asked(threads, [SYSTEM, {"role": "user", "content": "Summary: ..."}, *history[-3:]])
        assert (recent.known, recent.reason) == (None, BranchReason.COMPACTION)
        kept = asked(threads, [*history[:3], {"role": "user", "content": "[cut]"}, *history[-2:]])
        assert (kept.known.turn, kept.reason) == (0, BranchReason.COMPACTION)

    def test_a_summary_that_was_sampled_here_begins_a_compacted_history(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("hi"), turn=0)
        summary = "The user said hello, and was greeted."
        asked(threads, [SYSTEM, HELLO, said("hi"), {"role": "user", "content": "Sum up."}], said(summary), turn=1)
        match = asked(threads, [SYSTEM, {"role": "user", "content": f"So far: {summary}"}])
        assert match.reason is BranchReason.COMPACTION

    def test_reasoning_that_does_not_come_back_is_another_history(self):
        threads = Threads()
        asked(threads, [HELLO], said("4", reasoning_content="2+2"), turn=0)
        whole = asked(threads, [HELLO, said("4", reasoning_content="2+2"), MORE])
        bare = asked(threads, [HELLO, said("4"), MORE])
        assert (whole.known.turn, whole.reason) == (0, None)
        assert (bare.known, bare.reason) == (None, BranchReason.REASONING_STRIPPED)

    def test_reasoning_can_be_restored(self):
        threads = Threads(restores_reasoning=True)
        asked(threads, [HELLO], said("4", reasoning_content="2+2"), turn=0)
        match = asked(threads, [HELLO, said("4"), MORE])
        assert (match.known.turn, match.reason, threads.num_restored) == (0, None, 1)
        assert match.messages[1]["reasoning_content"] == "2+2"

    def test_other_tools_are_a_branch_and_the_order_of_their_keys_is_none(self):
        def tool(**function):
            return [{"type": "function", "function": function}]

        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0, tools=tool(name="add", description="Add."))
        same = asked(threads, [HELLO, said("hi"), MORE], tools=tool(description="Add.", name="add"))
        other = asked(threads, [HELLO, said("hi"), MORE], tools=tool(name="sub"))
        assert (same.bridges, same.reason) == (True, None)
        assert (other.bridges, other.reason) == (False, BranchReason.TOOLS_CHANGED)


def test_matching_costs_work_linear_in_the_request(monkeypatch):
    """Ten times the messages take ten times the lines of code and hashed characters, and not more in a session with
    many conversations."""
    hashed, original = [], canonical._hash
    monkeypatch.setattr(canonical, "_hash", lambda parts: (hashed.extend(map(len, parts)), original(parts))[1])

    def work(num_messages, num_conversations):
        """Lines of code that are run and characters hashed where a request is new, and where it comes again."""
        threads, found = Threads(), []
        for n in range(num_conversations):
            asked(threads, [{"role": "user", "content": f"conversation {n}"}], said("hi"), turn=n)
        messages = [{"role": "user", "content": f"{n:4} " + "x" * 200} for n in range(num_messages)]
        for _ in range(2):
            hashed.clear()
            lines = 0

            def count(frame, event, argument):
                nonlocal lines
                lines += event == "line"
                return count

            before = sys.gettrace()
            sys.settrace(count)
            try:
                threads.match(messages)
            finally:
                sys.settrace(before)
            found.append((lines, sum(hashed)))
        return found

    few, many, among_others = work(300, 0), work(3000, 0), work(300, 3000)
    for (lines, characters), (more, longer), (there, same) in zip(few, many, among_others, strict=True):
        assert lines > 300 and characters > 300 * 200
        assert more <= 10 * lines and longer <= 10 * characters
        assert there <= lines + 50 and same == characters


def nodes_of(threads):
    waiting, count = [threads._root], 0
    while waiting:
        count += 1
        waiting += waiting.pop().children.values()
    return count


def _user(text):
    return {"role": "user", "content": text}


def test_what_was_refused_is_forgotten_and_what_others_have_is_kept():
    threads = Threads()
    first = threads.match([_user("a"), _user("b")])
    threads.answer(first, said("x"), 0)
    threads.close(first, answered=True)
    before = nodes_of(threads)
    open_one = threads.match([_user("a"), _user("b"), said("x"), _user("c")])
    refused = threads.match([_user("a"), _user("b"), said("x"), _user("c"), _user("d"), _user("e")])
    threads.close(refused, answered=False, forget=True)
    assert nodes_of(threads) == before + 1  # the message that the open one ends with
    threads.close(open_one, answered=False, forget=True)
    assert nodes_of(threads) == before
    again = threads.match([_user("a"), _user("b"), said("x"), _user("c")])
    assert (again.reason, again.known.turn) == (None, 0)
