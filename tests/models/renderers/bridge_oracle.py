"""What a format writes behind a turn, found without any cache: one rendering of the history, a turn that stands in for
the sampled one, and what follows it."""

import re

import numpy as np

from verbatim.core.errors import EnvironmentFault

MARK = "zqmark"


def ids(values):
    return np.asarray(values, dtype=np.int32)


def stand_in(calls=(), thought=None):
    """A turn with these calls (name, id), which ends with the mark."""
    turn = {"role": "assistant", "content": "" if calls else f"so {MARK}"}
    if calls:
        turn["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"place": MARK}}}
            for name, call_id in calls
        ]
    return turn if thought is None else {**turn, "reasoning_content": thought}


def written(renderer, messages, tools):
    """The text of a prompt; None where the format refuses it."""
    try:
        return renderer.decode(renderer.write_ids(messages, tools, True))
    except EnvironmentFault:
        return None


def behind(renderer, messages, tools, new, calls=(), thought=None):
    """The text from the token on that ends a turn; None where the format refuses the conversation."""
    whole = written(renderer, [*messages, stand_in(calls, thought), *new], tools)
    if whole is None or MARK not in whole:
        return None
    rest = whole[whole.rindex(MARK) + len(MARK) :]  # what follows the turn holds no mark
    ends = [renderer.decode(ids([token])) for token in renderer.stop_token_ids]
    ends += ["<|end|>"] if renderer.name == "gpt-oss" else []
    found = re.search("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))), rest)
    return None if found is None else rest[found.start() :]


def wrong(renderer, prompt, completion, found, expected):
    """What is wrong with a bridge, or None: it has to begin with the prompt and the turn, and go on with the text that
    is expected behind the turn, of which a completion that ended by itself has the first token."""
    size = len(prompt) + len(completion)
    if found[:size].tolist() != [*prompt.tolist(), *completion.tolist()]:
        return "other ids before"
    ended = len(completion) > 0 and int(completion[-1]) in renderer.stop_token_ids
    added = (renderer.decode(completion[-1:]) if ended else "") + renderer.decode(found[size:])
    return None if added == expected else f"{added!r} is not {expected!r}"
