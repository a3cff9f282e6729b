"""A client that does at random what agents do to their conversations, over any of the protocols."""

import asyncio
import contextlib
import json

from scripted_gateway import Client

from byte_renderer import CALL, CALL_END, END, ROLES

SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


# ---- what a conversation says, however it is written


def said(role, content, calls):
    """One message in a form that does not depend on white space, the order of arguments, or the names of calls."""
    return role, "".join("".join([content or "", *map(call_text, calls)]).split())


def call_text(call):
    name, arguments = call
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if isinstance(arguments, str):
        return arguments  # a call that was cut off is text
    if not name:
        return json.dumps(arguments, sort_keys=True) if arguments else ""
    return json.dumps({"name": name, "arguments": arguments}, sort_keys=True)


def says(message):
    """A message of a client."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return said(message["role"], content, calls)


def reads(ids):
    """The messages in ids, as the model reads them; the last one may have no end."""
    names, found = {token: role for role, token in ROLES.items()}, []
    for token in ids:
        if token in names:
            found.append((names[token], [], []))
        elif token == CALL:
            found[-1][2].append([])
        elif token not in (END, CALL_END):
            _, text, calls = found[-1]
            (calls[-1] if calls else text).append(token)
    return [said(role, bytes(text).decode(errors="replace"), map(_call_in, calls)) for role, text, calls in found]


def _call_in(data):
    text = bytes(data).decode(errors="replace")
    try:
        value = json.loads(text)
        return value["name"], value["arguments"]
    except ValueError:
        return "", text


# ---- how protocols write it


def rewritten(message, rng):
    """The same message, as some client would write it down."""
    message = json.loads(json.dumps(message))
    if rng.random() < 0.5:
        message = dict(reversed(message.items()))
    for c in message.get("tool_calls") or ():
        c["id"] = c["id"] if rng.random() < 0.5 else f"own_{c['id']}"
        with contextlib.suppress(ValueError):
            arguments = json.loads(c["function"]["arguments"])
            c["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=rng.choice([None, 2]))
    if not message["content"] and rng.random() < 0.5:
        message["content"] = None
    elif rng.random() < 0.3:
        message["content"] = [{"type": "text", "text": message["content"]}]
    if rng.random() < 0.5:
        message |= {"refusal": None, "annotations": []}
    return message


def for_chat(history, rng, most):
    messages = [rewritten(m, rng) if m["role"] == "assistant" else m for m in history]
    return {"messages": messages, "tools": TOOLS, "max_tokens": most}


def for_anthropic(history, rng, most):
    system, messages = "", []
    for m in history:
        if m["role"] == "system":
            system = m["content"]
        elif m["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
            messages.append({"role": "user", "content": [block]})
        elif m["role"] == "assistant":
            blocks = [{"type": "text", "text": m["content"]}] if m["content"] else []
            for c in m.get("tool_calls") or ():
                arguments = c["function"]["arguments"]
                try:
                    given = json.loads(arguments)
                except ValueError:
                    given = {"unreadable_arguments": arguments}
                blocks.append({"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": given})
            messages.append({"role": "assistant", "content": blocks})
        else:
            messages.append(dict(m))
    return {
        "system": system,
        "messages": messages,
        "max_tokens": most,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
    }


def for_responses(history, rng, most):
    items = []
    for m in history:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]})
            continue
        if m["content"] or not m.get("tool_calls"):
            kind = "output_text" if m["role"] == "assistant" else "input_text"
            items.append({"type": "message", "role": m["role"], "content": [{"type": kind, "text": m["content"]}]})
        items += [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in m.get("tool_calls") or ()]
    return {
        "input": items,
        "max_output_tokens": most,
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    }


def from_chat(answer):
    return [choice["message"] for choice in answer["choices"]]


def from_anthropic(answer):
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return [
        _message(
            text, [(b["id"], b["name"], _arguments(b["input"])) for b in answer["content"] if b["type"] == "tool_use"]
        )
    ]


def _arguments(given):
    return given["unreadable_arguments"] if list(given) == ["unreadable_arguments"] else json.dumps(given)


def from_responses(answer):
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    calls = [i for i in answer["output"] if i["type"] == "function_call"]
    return [_message(text, [(c["call_id"], c["name"], c["arguments"]) for c in calls])]


def _message(text, calls):
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in calls
        ]
    return message


def join_chat(events):
    calls, content = {}, ""
    for event in events:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for c in choice["delta"].get("tool_calls") or ():
                own = calls.setdefault(c["index"], {"id": "", "name": "", "arguments": ""})
                own["id"] += c.get("id") or ""
                for key, value in c["function"].items():
                    own[key] += value
    return [_message(content, [(c["id"], c["name"], c["arguments"]) for _, c in sorted(calls.items())])]


def join_anthropic(events):
    blocks = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["json"] += delta.get("partial_json", "")
    for block in blocks.values():
        block["input"] = json.loads(block["json"]) if block["json"] else {}
    return from_anthropic({"content": [blocks[index] for index in sorted(blocks)]})


def join_responses(events):
    (whole,) = (e["response"] for e in events if e["type"] in ("response.completed", "response.incomplete"))
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    (message,) = from_responses(whole)
    assert message["content"] == text
    return [message]


WAYS = {
    "chat/completions": (for_chat, from_chat, join_chat),
    "messages": (for_anthropic, from_anthropic, join_anthropic),
    "responses": (for_responses, from_responses, join_responses),
}


class RandomClient:
    """One agent of a session: keeps conversations, and does something to one of them with every request.

    Args:
        http: Connections.
        episode: Whose key it has.
        rng: Decides.
        name: Its system prompt.
    """

    def __init__(self, http, episode, rng, name):
        self.client, self.rng = Client(http, episode), rng
        self.system = {"role": "system", "content": name}
        self.histories = [[self.system, {"role": "user", "content": f"go {rng.random()}"}]]
        self.num_requests = self.num_given_up = 0
        self.received = []
        """(what was sent, what was answered), each answer once however often it came."""

    async def act(self):
        """Ask once more, in some way."""
        rng, place = self.rng, self.rng.randrange(len(self.histories))
        history = self.changed(self.histories[place])
        route = rng.choice(["chat/completions", "chat/completions", "messages", "responses"])
        write, read, join = WAYS[route]
        body = {"model": "m", **write(history, rng, rng.choice([1, 5, 1000, 1000, 1000]))}
        if route == "chat/completions" and rng.random() < 0.1:
            body["n"] = rng.choice([2, 3])
        if route == "chat/completions" and rng.random() < 0.1:
            body["stop"] = [rng.choice(["b", "ab", " "])]
        data = json.dumps(body).encode()
        way = rng.random()
        if way < 0.1:
            await self.given_up(route, data)
            if rng.random() < 0.5:
                return
        if way < 0.3 and "n" not in body:
            answers = [await self.streamed(route, body, join)]
        elif way < 0.35:
            answers = [read(a) for a in await asyncio.gather(*(self.whole(route, data) for _ in range(2)))]
        else:
            key = f"key {rng.random()}" if rng.random() < 0.1 else None
            answers = [read(await self.whole(route, data, key))]
            if key is not None or rng.random() < 0.1:  # its answer was lost on the way
                again = read(await self.whole(route, data, key, first=1))
                same = [*map(says, again)] == [*map(says, answers[0])]
                assert same or key is None
                if not same:  # that of an equal request that was left, or had failed
                    answers.append(again)
        messages = [message for answer in answers for message in answer]
        sent = tuple(map(says, history))
        self.received += [(sent, says(message), "stop" in body) for message in messages]
        self.go_on(place, history, rng.choice(messages))

    def changed(self, history):
        """The history as it is, compacted, edited, gone back in, or another one."""
        rng, move = self.rng, self.rng.random()
        if move < 0.1 and len(history) > 3:
            return [history[0], {"role": "user", "content": f"so far {rng.random()}"}, *history[-1:]]
        if move < 0.2 and len(history) > 3:
            at = rng.randrange(1, len(history))
            return [*history[:at], {**history[at], "content": f"edited {rng.random()}"}, *history[at + 1 :]]
        if move < 0.3 and len(history) > 3:
            ends = [n for n, m in enumerate(history) if m["role"] != "assistant" and n]
            return history[: rng.choice(ends) + 1]
        if move < 0.35:
            return [history[0], {"role": "user", "content": f"new {rng.random()}"}]
        return history

    def go_on(self, place, history, message):
        rng = self.rng
        after = {"role": "user", "content": f"{rng.choice(['more', 'why', 'ok'])} {rng.randint(0, 5)}"}
        if message.get("tool_calls"):
            last = message["tool_calls"][-1]["id"]
            after = {"role": "tool", "tool_call_id": last, "content": str(rng.randint(0, 9))}
        history = [*history, message, after]
        if rng.random() < 0.2:
            self.histories.append(history)
        elif len(history) > 40:
            self.histories[place] = [self.system, {"role": "user", "content": f"again {rng.random()}"}]
        else:
            self.histories[place] = history

    async def post(self, route, data, **headers):
        self.num_requests += 1
        return await self.client.post(route, data, **headers)

    async def whole(self, route, data, key=None, first=0):
        """The answer; asked for again while the sampler fails."""
        headers = {**self.client.headers, "content-type": "application/json"}
        headers |= {} if key is None else {"idempotency-key": key}
        for attempt in range(first, 20):
            self.num_requests += 1
            url = f"{self.client.episode.base_url}/{route}"
            sent = {**headers, "x-stainless-retry-count": str(attempt)}
            async with self.client.http.post(url, data=data, headers=sent) as response:
                answer = await response.json()
                if response.status == 200:
                    return answer
                assert response.status == 500 and "the script says so" in json.dumps(answer), answer
        raise AssertionError("the sampler never answers")

    async def given_up(self, route, data):
        self.num_given_up += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.choice([0.0, 0.002, 0.01])):
                await self.post(route, data)

    async def streamed(self, route, body, join):
        """The answer of a stream, maybe after one that was cut off."""
        if self.rng.random() < 0.3:
            await self.events(route, body, most=self.rng.randint(0, 4))
        for _ in range(20):
            if (events := await self.events(route, body)) is not None:
                return join(events)
        raise AssertionError("the sampler never answers")

    async def events(self, route, body, most=None):
        """The events of a stream; None where the sampler failed."""
        self.num_requests += 1
        self.num_given_up += most is not None
        url, found = f"{self.client.episode.base_url}/{route}", []
        async with self.client.http.post(url, json={**body, "stream": True}, headers=self.client.headers) as answer:
            if answer.status == 500:
                return None
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if len(found) == most:
                    break
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
                    assert "error" not in found[-1] or found[-1]["error"] is None, found[-1]
        return found
