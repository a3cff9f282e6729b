"""Prevents text from users, tools and data from becoming a control token in any template or renderer.

There are two independent halves, so that renderers may split and join text between them:

- `SpecialTokenEscaper.text` marks untrusted text: it inserts a break after every character with which a control token
  begins, and before every character with which a control token ends. So no piece of the text can begin or end a control
  token, even if a template removes parts of the text, adds other text next to it, or changes its case.
- `EscapingTokenizer` encodes. If a control token's string has no break inside, the template has written the string, and
  it is encoded as that token. All breaks are then removed, and the rest of the text is encoded as plain text.

So the ids decode to exactly the original text, and every control token among them comes from the template. Plain text
gets the same ids as from the tokenizer itself.

`detect_family.check_escaping` refuses templates that defeat the breaks: templates that write both ends of a control
token around a text, or that undo an escape in a text.

A control token is any added token of the tokenizer, except ordinary vocabulary: tokens of only spaces, and tokens of
only letters and digits that are not special. A break is U+FDD0 U+FDD1, two noncharacters. A literal U+FDD0 is written
as U+FDD0 U+FDD2, so that marked pieces can be joined in any order and still be decoded.

Example: `"a <|im_end|> b"` becomes the ids of `a`, ` <`, `|`, `im`, `_end`, `|>`, ` b`, or of other pieces, depending
on how the tokenizer splits ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from tokenizers import AddedToken, Tokenizer

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.core.types import Message
from verbatim.models.renderers.chat_template import ChatTemplate
from verbatim.models.renderers.nesting import MAX_DEPTH, is_shallow
from verbatim.models.renderers.renderer import Schemas

ESCAPE = "\ufdd0"
"""The first character of every mark, a Unicode noncharacter."""
BREAK = ESCAPE + "\ufdd1"
"""A mark that separates text: the text before the mark and the text after the mark cannot form a control token
together."""
LITERAL = ESCAPE + "\ufdd2"
"""Represents U+FDD0 itself in marked text."""
_ASCII = "\\ufdd"  # how marks begin in ASCII JSON; in marked text, a break separates these characters
_ASCII_BREAK, _ASCII_LITERAL, _ASCII_ESCAPE = (json.dumps(mark)[1:-1] for mark in (BREAK, LITERAL, ESCAPE))
_OPEN, _CLOSE = "\ufdd3", "\ufdd4"  # the brackets around control tokens, for the second tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that templates compare with. These roles are not marked. Any other role is treated as untrusted text."""

_ATTACHMENTS = ("image", "images", "audio", "audios", "video", "videos", "attachments")

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CACHED_CHARACTERS = 256
"""Maximum length of text whose result is cached, in characters. Longer text rarely recurs, and would fill the
memory."""


Marked: TypeAlias = dict[int, tuple[Message, dict[str, Any]]]
"""Messages by `id`, each with its marked copy. The dict keeps the originals alive, so that their ids are not reused."""


class SpecialTokenEscaper:
    """Marks untrusted text for one tokenizer's control tokens."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        # Templates strip and add spaces, so a control token's ends are the first and last characters that are not
        # spaces.
        bare = [token.strip() for token in control_tokens]
        # A break at every occurrence of a letter or digit would end up in almost every word. So if a token begins or
        # ends with a letter or digit, a break is inserted only where the token's first (or last) two characters occur
        # together. It is also inserted at the edge of a text, because the adjacent text may have the other character.
        self._first = sorted({token[0] for token in bare if not token[0].isalnum()})
        self._last = sorted({token[-1] for token in bare if not token[-1].isalnum()})
        begins = {rf"(?<={t[0]})(?=[{re.escape(t[1:2])}\s]|\Z)" for t in bare if t[0].isalnum()}
        ends = {rf"(?:(?<=[{re.escape(t[-2:-1])}\s])|\A)(?={t[-1]})" for t in bare if t[-1].isalnum()}
        self._pairs = re.compile("|".join(sorted(begins | ends))) if begins | ends else None
        # Cached, because the same short strings of schemas and replies are marked in every turn.
        self._mark_short: Callable[[str], str] = lru_cache(maxsize=4096)(self._mark)

    def text(self, text: str) -> str:
        """Mark one untrusted string.

        Raises:
            EnvironmentFault: the string contains a lone surrogate, which is not a character and cannot be encoded.
        """
        return self._mark_short(text) if len(text) <= _CACHED_CHARACTERS else self._mark(text)

    def _mark(self, text: str) -> str:
        found = _SURROGATE.search(text)
        if found:
            raise EnvironmentFault(
                f"a message holds the lone surrogate U+{ord(found[0]):04X} at position {found.start()}, which is not "
                'text; decode bytes with errors="replace"'
            )
        text = text.replace(ESCAPE, LITERAL).replace(_ASCII, _ASCII[0] + BREAK + _ASCII[1:])
        if self._pairs is not None:
            text = self._pairs.sub(BREAK, text)
        for character in self._first:
            text = text.replace(character, character + BREAK)
        for character in self._last:
            text = text.replace(character, BREAK + character)
        return text

    def json_text(self, text: str) -> str:
        """Mark text that a renderer may parse as JSON, so that the parsed strings are marked as well.

        Text that is not JSON is marked as it is.

        Raises:
            EnvironmentFault: the JSON is nested too deeply to be traversed.
        """
        try:
            value = json.loads(text)
            shallow = is_shallow(value)
        except ValueError:
            return self.text(text)
        except RecursionError:
            shallow = False
        if not shallow:
            raise EnvironmentFault(
                f"a call's arguments are JSON that is nested deeper than {MAX_DEPTH} levels; expected at most that many"
            )
        # Only the strings are marked, so that JSON's own brackets stay unmarked. An escape such as \u003c may hide a
        # character that has to be marked. So the result is compared with the marked value, and serialised from that if
        # they differ.
        marked, wanted = _JSON_STRING.sub(lambda found: self.text(found[0]), text), self.value(value)
        try:
            return marked if json.loads(marked) == wanted else json.dumps(wanted, ensure_ascii=False)
        except ValueError:
            return json.dumps(wanted, ensure_ascii=False)

    def value(self, value: Any) -> Any:
        """Mark every string in a JSON value, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def messages(self, messages: Sequence[Message], marked: Marked | None = None) -> list[dict[str, Any]]:
        """Mark every string of messages except the role.

        Args:
            messages: The messages; they are not changed.
            marked: Messages that are already marked. Newly marked messages are added to this dict.

        Reasoning belongs in `reasoning_content`. If an assistant's message lacks that field, a leading `<think>` block
        of its content is moved there, as chat templates do. Think tags anywhere else are ordinary text.

        Raises:
            EnvironmentFault: a message has an image, audio, or another part that is not text. A list of text parts is
                refused too, because templates join parts differently. Only a single string has the same meaning for all
                templates.
        """
        marked = {} if marked is None else marked
        for number, message in enumerate(messages):
            if id(message) not in marked:
                marked[id(message)] = message, self._message(message, number)
        return [dict(marked[id(message)][1]) for message in messages]

    def _message(self, message: Message, number: int) -> dict[str, Any]:
        _refuse_attachments(message, number)
        fields = dict(_reasoning_apart(message))
        role = fields.pop("role")
        calls = fields.get("tool_calls")
        written = {"role": role if role in ROLES else self.value(role), **self.value(fields)}
        if isinstance(calls, (list, tuple)):
            written["tool_calls"] = [self._call(call) for call in calls]
        return written

    def tools(self, tools: Schemas) -> list[dict[str, Any]] | None:
        """Mark every string of the tool schemas. Returns None if there are no tools."""
        return [self.value(tool) for tool in tools] if tools else None

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        marked = self.value(call)
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            marked[self.text("function")][self.text("arguments")] = self.json_text(function["arguments"])
        return marked


class EscapingTokenizer:
    """The tokenizer with which renderers encode. It understands the marks of its `escaper`.

    Raises:
        ModelError: the tokenizer's control tokens cannot be kept out of plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.unescaped = tokenizer
        """The model's own tokenizer."""
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"a {type(tokenizer).__name__} is a slow tokenizer, whose control tokens cannot be kept "
                "out of plain text; a tokenizer.json is needed"
            )
        # A copy, because padding and truncation are state of the tokenizer, which other code may change.
        self._ordinary = Tokenizer.from_str(backend.to_str())
        self._ordinary.no_padding()
        self._ordinary.no_truncation()
        added = self._ordinary.get_added_tokens_decoder()
        self.control_tokens: Mapping[str, int] = {t.content: i for i, t in added.items() if _is_control(t)}
        short = [content for content in self.control_tokens if len(content) == 1]
        if short:
            raise ModelError(
                f"the tokenizer's special token {short[0]!r} is a single character, which text cannot be "
                "kept from containing"
            )
        alone = {t.content for t in added.values() if t.single_word}
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        patterns = [rf"(?<!\w){re.escape(t)}(?!\w)" if t in alone else re.escape(t) for t in longest_first]
        self._scan = re.compile(
            "|".join([BREAK, LITERAL, re.escape(_ASCII_BREAK), re.escape(_ASCII_LITERAL), _OPEN, *patterns])
        )
        self._marked, self._ids = _with_bracketed_tokens(self._ordinary, self.control_tokens)
        self._encode_short: Callable[[str], tuple[int, ...]] = lru_cache(maxsize=4096)(self._encode)
        self.escaper = SpecialTokenEscaper(list(self.control_tokens))
        # Parsers need these several times a turn, so they are looked up once.
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self._id_of: Callable[[str], Any] = lru_cache(maxsize=1024)(tokenizer.convert_tokens_to_ids)
        self._templates: dict[str, ChatTemplate] = {}
        self._check()

    def __getattr__(self, name: str) -> Any:
        if name == "unescaped":  # not set yet while a copy is being made; without this check the lookup would recurse
            raise AttributeError(name)
        return getattr(self.unescaped, name)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The ids of marked text."""
        assert not add_special_tokens, "a renderer writes its own control tokens"
        return list(self._encode_short(text) if len(text) <= _CACHED_CHARACTERS else self._encode(text))

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        """The ids of marked text, for families of the package `renderers` that also want offsets.

        Families use offsets to attribute ids to messages. Nothing here reads these, so all offsets are (0, 0).
        """
        ids = self.encode(text)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, add_generation_prompt: bool = False
    ) -> str:
        """Render with the chat template; replaces `apply_chat_template`.

        Raises:
            EnvironmentFault: the template refuses these messages.
            TemplateFault: the rendering exceeds its budget.
            ModelError: the tokenizer has no template, or the template cannot be compiled.
        """
        return self.template(tools).text(messages, tools, add_generation_prompt)

    def template(self, tools: Any = None) -> ChatTemplate:
        """The chat template that the tokenizer uses with these tools.

        Raises:
            ModelError: the tokenizer has no template for these tools, or the template cannot be compiled.
        """
        source = self.chat_source(tools)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self.special_tokens_map, str(self.name_or_path))
        return self._templates[source]

    def chat_source(self, tools: Any = None) -> str:
        """The source of the template for these tools. A tokenizer may have several templates, by name.

        Raises:
            ModelError: the tokenizer has no template for them.
        """
        try:
            source: str = self.unescaped.get_chat_template(tools=tools)
        except ValueError as error:
            raise ModelError(
                "the tokenizer has several chat templates, and none of them is named default; rename "
                "one to default, or put a single chat_template.jinja into the model's folder"
            ) from error
        return source

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        """Refuse to render without a budget. Use `chat_text`."""
        raise TypeError("cannot render a model's chat template here; call chat_text")

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids, exactly."""
        return self._ordinary.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each token of a list."""
        return self._id_of(tokens) if isinstance(tokens, str) else self.unescaped.convert_tokens_to_ids(tokens)

    def _encode(self, text: str) -> tuple[int, ...]:
        """The ids of marked text."""
        ids: list[int] = []
        for section in self._sections(text):
            encoding = self._marked.encode(section, add_special_tokens=False)
            ids += [self._ids.get(i, i) for i in encoding.ids]
        return tuple(ids)

    def _sections(self, text: str) -> Iterator[str]:
        """The parts of marked text, to be encoded one by one, with control tokens in brackets and without breaks."""
        section = ""
        end = 0
        for found in self._scan.finditer(text):
            mark = found[0]
            section += text[end : found.start()]
            end = found.end()
            if mark in (LITERAL, _ASCII_LITERAL):
                section += ESCAPE if mark == LITERAL else _ASCII_ESCAPE
            elif mark == _OPEN:
                # The text itself contains our opening bracket. What follows the bracket is encoded separately, so that
                # it is not mistaken for a bracketed token. A tokenizer that adds a space before each text adds a space
                # here, too.
                yield section + mark
                section = ""
            elif mark not in (BREAK, _ASCII_BREAK):
                section += _OPEN + mark + _CLOSE
        section += text[end:]
        if section:
            yield section

    def _check(self) -> None:
        """Check that trusted text gets the tokenizer's own ids, and untrusted text never becomes a control token."""
        control = set(self.control_tokens.values())
        # A sample of the tokens reveals a tokenizer with steps outside tokenizer.json, which this class cannot
        # reproduce.
        trusted = "".join(f"x{token} y" for token in list(self.control_tokens)[:20])
        if self.encode(trusted) != self.unescaped.encode(trusted, add_special_tokens=False):
            raise ModelError(
                "the tokenizer does more than its tokenizer.json says; prompts would differ from what "
                "the model was trained on"
            )
        for token in self.control_tokens:
            if control.intersection(self.encode(self.escaper.text(f"x{token}y"))):
                raise ModelError(
                    f"the tokenizer cannot write {token!r} as plain text, so text of users and tools "
                    "could not be kept from becoming a control token"
                )


def _is_control(token: AddedToken) -> bool:
    """False if the added token consists of spaces only, or if it is not special and consists of letters and digits
    only; otherwise True."""
    content = token.content
    return bool(content.strip()) and (token.special or not content.isalnum())


def _with_bracketed_tokens(ordinary: Tokenizer, control: Mapping[str, int]) -> tuple[Tokenizer, dict[int, int]]:
    """Return (1) a copy of the tokenizer that recognises control tokens only in brackets, and (2) a map from the copy's
    id of each added token to the original tokenizer's id.

    With this copy, a single pass over the whole text splits at control tokens exactly as the ordinary tokenizer does,
    with the same treatment of surrounding spaces and prefixes. Encoding the text piece by piece would give other ids.
    """
    data = json.loads(ordinary.to_str())
    for token in data["added_tokens"]:
        if token["content"] in control:
            token.update(content=_OPEN + token["content"] + _CLOSE, normalized=False, single_word=False)
    bracketed = Tokenizer.from_str(json.dumps(data))
    contents = {token["content"]: token["id"] for token in json.loads(ordinary.to_str())["added_tokens"]}
    ids = {}
    for content, own in contents.items():
        other = bracketed.token_to_id(_OPEN + content + _CLOSE if content in control else content)
        assert other is not None
        ids[other] = own
    return bracketed, ids


def _refuse_attachments(message: Message, number: int) -> None:
    """Refuse a message with images, audio, or content that is not a single string."""
    content: object = message.get("content")
    found = [key for key in _ATTACHMENTS if message.get(key)]
    if isinstance(content, (list, tuple)):
        kinds = [part.get("type", "untyped") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        found.append(f"a list of parts ({', '.join(map(str, kinds))}) as content")
    elif not (content is None or isinstance(content, str)):
        found.append(f"content of type {type(content).__name__}")
    if found:
        raise EnvironmentFault(
            f"message {number} ({message.get('role')}) holds {' and '.join(found)}; messages are "
            'text only today: give "content" as one string'
        )


def _reasoning_apart(message: Message) -> Mapping[str, Any]:
    """The message with a leading `<think>` block of its content moved to `reasoning_content`."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or "reasoning_content" in message:
        return message
    before, tag, after = content.lstrip().partition("</think>")
    if not tag or not before.startswith("<think>"):
        return message
    reasoning = before.removeprefix("<think>").strip("\n")
    return {**message, "reasoning_content": reasoning, "content": after.lstrip("\n")}
