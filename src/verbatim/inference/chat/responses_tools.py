"""Reads the tools of OpenAI's Responses: functions, custom tools that take one string, and namespaces of such tools.

Chat templates know only functions. A tool in a namespace therefore becomes a function with the namespace as its prefix,
and a custom tool becomes a function with one string argument, `input`. Calls are translated back to the tool's own
form.

Example: the namespace "agents" with the function "wait" and the custom tool "patch" becomes the functions
`agents__wait` and `agents__patch`; `agents__patch` has the argument `input`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.core.texts import brief
from verbatim.inference.chat.fields import (
    MOST_TOOLS,
    BadField,
    Fields,
    object_of,
    read_list,
    read_object,
    read_text,
    text_of,
)
from verbatim.inference.chat.messages import function_tool
from verbatim.inference.chat.protocol import Options, ToolForm

INPUT = "input"
"""Name of a custom tool's argument."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "async": (False,),
}
_FUNCTION = Fields(
    honoured={"type", "name", "description", "parameters"},
    neutral=_NEUTRAL,
    without_effect={"strict", "cache_control", "output_schema"},
)
_CUSTOM = Fields(honoured={"type", "name", "description", "format"}, neutral=_NEUTRAL)
_NAMESPACE = Fields(honoured={"type", "name", "description", "tools"})
_FORMAT = Fields(honoured={"type", "syntax", "definition"})


class ReadTools:
    """The tools of one request.

    Args:
        body: The request's body.
        options: With "other_tools", tools of unsupported types are dropped; without it, they are refused. With
            "tool_grammar", grammars are shown to the model but not enforced; without it, they are refused.

    Raises:
        BadField: a tool's type is not supported, or two tools would have the same function name.
    """

    def __init__(self, body: Mapping[str, Any], options: Options) -> None:
        self.tools: list[dict[str, Any]] = []
        """The tools as functions, for the chat template."""
        self.forms: dict[str, ToolForm] = {}
        """The tools that are not plain functions in the protocol, by function name."""
        self.unenforced: dict[str, None] = {}
        """The options that were used; a dict that serves as an ordered set."""
        self._options = options
        for tool, where, namespace in _each(read_list(body, "tools", most=MOST_TOOLS), "tools", None):
            self._add(tool, where, namespace)
        names = [tool["function"]["name"] for tool in self.tools]
        if self.forms and (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise BadField("tools", f"tools: two of them would have the function name {twice!r}")

    def _add(self, tool: Mapping[str, Any], where: str, namespace: Mapping[str, Any] | None) -> None:
        """Add one tool as the function that the chat template shows."""
        kind = tool.get("type")
        if kind == "function":
            _FUNCTION.check(tool, where=where)
            shown = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
        elif kind == "custom":
            _CUSTOM.check(tool, where=where)
            shown = self._custom(tool, where)
        elif "other_tools" in self._options.unenforced:
            self.unenforced["other_tools"] = None
            return
        else:
            raise BadField(
                "tools",
                f"{where}: a tool of type {brief(kind)} is not available here; accepted are functions "
                "and custom tools, which the client runs, and namespaces of these two",
            )
        own = text_of(shown.get("name"), f"{where}.name")
        within = "" if namespace is None else str(namespace["name"])
        if namespace is not None or kind == "custom":
            shown["name"] = joined_name(within, own)
            self.forms[shown["name"]] = ToolForm(name=own, namespace=within, is_custom=kind == "custom")
        about = read_text(namespace, "description") if namespace is not None else ""
        # Templates have no place for a namespace's description, so it becomes part of the first tool's description.
        if about and not any(form.namespace == within for form in list(self.forms.values())[:-1]):
            shown["description"] = "\n\n".join(filter(None, (about, shown.get("description"))))
        self.tools.append(function_tool(shown, where))

    def _custom(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The function that represents a custom tool. A grammar is appended to the description."""
        description = read_text(tool, "description")
        form = read_object(tool, "format")
        _FORMAT.check(form, where=f"{where}.format")
        if form.get("type", "text") != "text":
            if "tool_grammar" not in self._options.unenforced:
                raise BadField(
                    "tools.format",
                    f"{where}.format = {brief(form)} cannot be honoured here: tokens are "
                    "sampled from the model's own distribution, without a grammar",
                )
            self.unenforced["tool_grammar"] = None
            grammar = f"{text_of(form.get('syntax'), f'{where}.format.syntax')} grammar"
            definition = text_of(form.get("definition"), f"{where}.format.definition")
            description = f"{description}\n\nThe input follows this {grammar}:\n{definition}".lstrip()
        schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        return {"name": tool.get("name"), "description": description, "parameters": schema}


def _each(
    given: list[Any], path: str, namespace: Mapping[str, Any] | None
) -> Iterator[tuple[dict[str, Any], str, Mapping[str, Any] | None]]:
    """Yield (tool, path, namespace) for every tool. A nested namespace is yielded like a tool, and is later refused
    because of its type."""
    for k, value in enumerate(given):
        where = f"{path}[{k}]"
        tool = object_of(value, where)
        if tool.get("type") == "namespace" and namespace is None:
            _NAMESPACE.check(tool, where=where)
            text_of(tool.get("name"), f"{where}.name")
            yield from _each(read_list(tool, "tools", most=MOST_TOOLS), f"{where}.tools", tool)
        else:
            yield tool, where, namespace


def joined_name(namespace: str, name: str) -> str:
    """A tool's function name in the chat template.

    >>> joined_name("agents", "wait"), joined_name("mcp__git__", "log"), joined_name("", "add")
    ('agents__wait', 'mcp__git__log', 'add')
    """
    return f"{namespace}{'' if not namespace or namespace.endswith('__') else '__'}{name}"


def named(choice: Mapping[str, Any]) -> str | None:
    """The function name of the tool that a `tool_choice` names; None if it does not name a tool."""
    if choice.get("type") not in ("function", "custom"):
        return None
    return joined_name(read_text(choice, "namespace"), text_of(choice.get("name"), "tool_choice.name"))
