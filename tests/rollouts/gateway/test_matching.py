"""Requests are matched to the conversations that they continue, however a client writes them down."""

import doctest
import gc
import random
import sys
import uuid

import pytest

from verbatim.rollouts.gateway import canonical, clocks
from verbatim.rollouts.gateway.canonical import Digester, canonical_arguments, frame_of, text_of
from verbatim.rollouts.gateway.threads import BranchReason, Threads

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


def digests(messages):
    digester = Digester()
    return [digester.digest(message) for message in messages]


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
            ("main", BranchReason.HISTORY_EDITED),
        ]
        assert goes_on.found == "sub/1 continued message 2 before"

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
        assert (match.known.turn, match.num_known, match.reason) == (0, 2, BranchReason.HISTORY_EDITED)
        assert "message 3, an answer, differs from the sampled one" in match.found

    def test_a_first_answer_that_is_written_as_text_edits_the_history(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("", ("add", {})), turn=0)
        match = asked(threads, [SYSTEM, HELLO, said("Calling tools: add"), MORE])
        assert (match.known, match.reason) == (None, BranchReason.HISTORY_EDITED)
        assert match.found == "message 2, an answer, differs from the sampled one"

    def test_going_back_edits_the_history(self):
        threads = Threads()
        asked(threads, [HELLO], said("hi"), turn=0)
        asked(threads, [HELLO, said("hi"), MORE], said("yes"), turn=1)
        assert asked(threads, [HELLO, said("hi"), OTHER]).reason is BranchReason.HISTORY_EDITED

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
    hashed, original = [], canonical.digest_of
    monkeypatch.setattr(canonical, "digest_of", lambda parts: (hashed.extend(map(len, parts)), original(parts))[1])

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
                """Count the lines of Verbatim; a finalizer of something else may run at any time."""
                nonlocal lines
                if not frame.f_globals.get("__name__", "").startswith("verbatim."):
                    return None
                lines += event == "line"
                return count

            before, collects = sys.gettrace(), gc.isenabled()
            gc.disable()
            sys.settrace(count)
            try:
                threads.match(messages)
            finally:
                sys.settrace(before)
                if collects:
                    gc.enable()
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


PROMPTS = [
    # two system prompts; one agent where no answer comes back; one agent where answers do
    ("It is 2026-11-26.", "It is 2026-11-27.", True, True),
    ("It is 2026-11-26T09:00:00Z.", "It is 2026-11-27T17:05:10+01:00.", True, True),
    ("You help. It is 15:47.", "You help. It is 9:03.", True, True),
    ("You help. It's 15:47.", "You help. It's 15:48.", True, True),
    ("The time is now 15:47 here.", "The time is now 15:48 here.", True, True),
    ("Current time (UTC): 15:47", "Current time (UTC): 15:48", True, True),
    ("You help. Time: 1790000000", "You help. Time: 1790000060", True, True),
    ("Now 1790000000123 ms", "Now 1790000060456 ms", True, True),
    ("You help.\n[15:47]", "You help.\n[15:48]", True, True),
    ("You help.\n1790000000", "You help.\n1790000060", True, True),
    ("You help at 9:59 AM.", "You help at 10:00 AM.", True, True),
    ("[09:15:30] You help.", "[10:16:31] You help.", True, True),
    ("Today is Monday.", "Today is Tuesday.", False, True),
    ("It is Mon Nov 30 2026.", "It is Tue Dec 1 2026.", False, True),
    ("You have the 1st try.", "You have the 2nd try.", False, True),
    ("Step 9 of 20 [##--]", "Step 10 of 20 [###-]", False, True),
    ("Done |=====>    |", "Done |======>   |", False, True),
    ("Used 1,234.5 of $10.00", "Used 999 of $9.50", False, True),
    ("Session 0f8fad5b.", "Session 7c9e6679.", False, True),
    ("There is 1 file left.", "There are 12 files left.", False, True),
    ("Explain John 3:16.", "Explain John 10:15.", False, True),
    ("You serve account 1790000000.", "You serve account 1790000001.", False, True),
    ("Call 2025550123.", "Call 2025550124.", False, True),
    ("Open 9:00-17:30.", "Open 8:00-16:30.", False, True),
    ("You are agent 1 of 3.", "You are agent 2 of 3.", False, True),
    ("Report on 2026-01-05.", "Report on 2026-01-06.", True, True),
    ("Plan the work of Monday.", "Plan the work of Tuesday.", False, False),
    ("Plan the work of January.", "Plan the work of February.", False, False),
    ("You may go.", "You march go.", False, False),
    ("Write C++.", "Write C#.", False, False),
    ("Write C.", "Write C++.", False, False),
    ("Use the operator +.", "Use the operator -.", False, False),
    ("Use the operator '<' here.", "Use the operator '>' here.", False, False),
    ("You clean room dead4.", "You clean room beef5.", False, False),
    ("You clean room dead44.", "You clean room beef55.", False, False),
    ("You run on a100.", "You run on b200.", False, False),
    ("Session 3f2a.", "Session b07d.", False, True),
    ("Session abcdef12.", "Session 12abcdef.", False, True),
    ("You clean the facade.", "You clean the decade.", False, False),
    ("Answer yes.", "Answer no.", False, False),
]


def _system(text):
    return {"role": "system", "content": text}


class TestAnOpeningThatChanges:
    """A system prompt with a clock or a counter: still one agent. With other words: another one."""

    @staticmethod
    def played(prompts, *, answers=("one", "two", "three", "four")):
        """A client that sends its whole history each time, under the next system prompt: agent and reason of each."""
        threads, history, found = Threads(), [HELLO], []
        for number, (prompt, text) in enumerate(zip(prompts, answers, strict=False)):
            match = asked(threads, [{"role": "system", "content": prompt}, *history], said(text), turn=number)
            found.append((match.agent, match.reason, match.found))
            history += [said(text), {"role": "user", "content": f"go on {number}"}]
        return found

    @pytest.mark.parametrize(
        "prompt",
        [
            "You help. It is Thu Nov 26 15:4{}:10 UTC 2026.",
            "You are a careful agent. This is step {} of 20.",
            "You help people. {}",
            "step {}",
            "You help. Left: {} tokens, {} steps, $0.{}.",
            "You help. Session 3f{}a9c1e-77b{}-4d1f-9aa1-5{}c0ffee1234.",
        ],
    )
    def test_a_conversation_that_goes_on_is_that_of_the_agent_who_spoke(self, prompt):
        found = self.played([prompt.replace("{}", str(number)) for number in range(4)])
        assert [agent for agent, _, _ in found] == ["main"] * 4
        edited = (BranchReason.HISTORY_EDITED, "the system prompt is new, but other messages are not")
        assert [one[1:] for one in found] == [(None, ""), edited, edited, edited]

    def test_days_months_and_plurals_go_on_with_a_clock_or_a_counter(self):
        found = self.played(
            [
                "You help. It is Saturday, 31 January, 11:59 PM. There are 2 steps left [#-].",
                "You help. It is Sunday, 1 February, 12:03 AM. There is 1 step left [##].",
            ]
        )
        assert [agent for agent, _, _ in found] == ["main"] * 2

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (
                "You are the planner of a team that repairs programs. Answer in short sentences, and never guess.",
                "You are the worker of a team that repairs programs. Answer in short sentences, and never guess.",
            ),
            ("You are agent 1 of 3 in a team: plan. Be short.", "You are agent 2 of 3 in a team: review. Be short."),
            (
                "You help to write letters. Be polite, and ask before you send.",
                "You help to write letters. Be polite, and ask before you send. Review the draft.",
            ),
        ],
    )
    def test_variants_of_one_prompt_are_agents_though_they_share_the_history(self, one, other):
        found = self.played([one, other])
        assert [found_one[:2] for found_one in found] == [("main", None), ("sub/1", BranchReason.SUB_AGENT)]

    def test_numbered_agents_with_other_tools_are_two_though_they_share_the_history(self):
        def tools(name):
            return [{"type": "function", "function": {"name": name, "parameters": {}}}]

        for own, agent in ((tools("plan"), "main"), (tools("work"), "sub/1")):
            threads = Threads()
            asked(threads, [_system("You are agent 1 of 3."), HELLO], said("a plan"), turn=0, tools=tools("plan"))
            shared = [_system("You are agent 2 of 3."), HELLO, said("a plan"), MORE]
            assert asked(threads, shared, tools=own).agent == agent

    def test_a_request_that_is_repeated_under_a_later_counter_is_the_same_agents(self):
        threads = Threads()
        asked(threads, [_system("Step 1."), HELLO], said("ok"), turn=0)
        for _ in range(3):
            assert asked(threads, [_system("Step 2."), HELLO, said("ok"), MORE]).agent == "main"

    @pytest.mark.parametrize(
        "prompts",
        [
            ("You are agent {} of 3.",) * 2,
            (
                "You argue for the motion. Speak to the house in three sentences.",
                "You argue against the motion. Speak to the house in three sentences.",
            ),
        ],
    )
    def test_two_who_are_given_each_others_text_stay_two(self, prompts):
        threads = Threads()
        texts = [f"{name} says at some length what it thinks of the matter" for name in ("one", "two", "three", "four")]
        own = [[_system(prompt.format(number))] for number, prompt in enumerate(prompts, 1)]
        own[0].append(HELLO)
        agents = []
        for number, text in enumerate(texts):
            conversation = own[number % 2]
            agents.append(asked(threads, conversation, said(text), turn=number).agent)
            conversation.append(said(text))
            own[1 - number % 2].append(_user(text))
        assert agents == ["main", "sub/1", "main", "sub/1"]

    def test_a_prompt_of_many_characters_is_not_looked_into(self, monkeypatch):
        """It would hold up the other sessions; one that does not change is known by its digest."""
        monkeypatch.setattr("verbatim.rollouts.gateway.agents.LONGEST", 100)
        for length, agents in ((80, ["main"] * 3), (100, ["main", "sub/1", "sub/2"])):
            found = self.played([f"Step {number}. " + "x" * length for number in range(3)])
            assert [agent for agent, _, _ in found] == agents
        looked = []
        monkeypatch.setattr("verbatim.rollouts.gateway.agents.frame_of", lambda opening: looked.append(opening) or b"")
        assert [agent for agent, _, _ in self.played(["the same prompt"] * 4)] == ["main"] * 4
        assert looked == []

    def test_a_short_answer_of_another_agent_takes_no_conversation_away(self):
        threads = Threads()
        asked(threads, [_system("You help. Step 1."), HELLO], said("ok"), turn=0)
        asked(threads, [_system("Another."), OTHER], said("ok"), turn=1)
        later = asked(threads, [_system("You help. Step 2."), HELLO, said("ok"), MORE])
        assert later.agent == "main"

    def test_another_prompt_is_another_agent_though_it_is_given_the_history(self):
        found = self.played(["You help people to write letters.", "Review what was done so far, and list mistakes."])
        assert [one[:2] for one in found] == [("main", None), ("sub/1", BranchReason.SUB_AGENT)]

    def test_workers_with_numbers_are_agents_of_their_own(self):
        threads = Threads()
        for number in (1, 2):
            task = {"role": "user", "content": f"task {number}"}
            messages = [{"role": "system", "content": f"You are worker {number}."}, task]
            match = asked(threads, messages, said("ok"), turn=0)
            assert match.agent == ("main" if number == 1 else "sub/1")

    def test_a_new_conversation_at_another_time_is_the_same_agent(self):
        threads = Threads()
        first = [{"role": "system", "content": "You help. It is 2026-11-26 15:47."}, HELLO]
        later = [{"role": "system", "content": "You help. It is 2026-11-26 15:48."}, OTHER]
        asked(threads, first, said("so"), turn=0)
        match = asked(threads, later)
        assert (match.agent, match.reason) == ("main", BranchReason.NEW_CONVERSATION)

    @pytest.mark.parametrize(
        ("prompt", "found"),
        [
            ("You help. It is 15:4{}.", ("main", BranchReason.COMPACTION)),
            ("You help. Step {}.", ("sub/1", BranchReason.SUB_AGENT)),  # as an agent 2 that is given what agent 1 said
        ],
    )
    def test_a_summary_under_a_later_clock_is_a_compaction_and_under_a_counter_another_agents(self, prompt, found):
        threads, answer = Threads(), said("we have found the key under the old stone")
        asked(threads, [_system(prompt.format(0)), HELLO, said("a"), MORE], answer, turn=0)
        summary = _user(f"so far: {answer['content']}; go on")
        match = asked(threads, [_system(prompt.format(1)), summary])
        assert (match.agent, match.reason) == found

    @pytest.mark.parametrize(("one", "other", "is_moment", "is_counter"), PROMPTS)
    def test_prompts_that_differ_in_little(self, one, other, is_moment, is_counter):
        """One agent where nothing is shared, and one agent where the history is: `PROMPTS` says of whom."""
        threads = Threads()
        asked(threads, [_system(one), HELLO], said("so"), turn=0)
        assert (asked(threads, [_system(other), OTHER]).agent == "main") == is_moment
        for before, after in ((one, other), (other, one)):
            agents = [agent for agent, _, _ in self.played([before, after])]
            assert agents == ["main", "main" if is_counter else "sub/1"]

    def test_a_name_that_the_client_gives_holds(self):
        threads = Threads()
        asked(threads, [SYSTEM, HELLO], said("a"), turn=0, thread="x")
        changed = [{"role": "system", "content": "You help. 2"}, HELLO, said("a"), MORE]
        assert asked(threads, changed, thread="y").agent == "sub/1"
        assert asked(threads, changed, agent="critic").agent == "critic"


def test_the_frame_of_a_prompt_has_no_random_id():
    """Four in a hundred UUIDs have a group without a digit."""
    assert doctest.testmod(canonical).failed == doctest.testmod(clocks).failed == 0
    rng = random.Random(0)
    ids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(400)]
    assert any(group.isalpha() for name in ids for group in name.split("-"))
    assert {frame_of([f"Work in session {name}."]) for name in ids} == {frame_of(["Work in session."])}
    assert frame_of(["Work in run_3f2a91."]) == frame_of(["Work in run_bc07d2."]) == frame_of(["Work in run."])
