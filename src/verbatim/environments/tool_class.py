"""Turns a class with a method `reset` and tool methods, as for TRL's `environment_factory`, into an environment."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from verbatim.core.ctrl_c import users_errors
from verbatim.core.errors import ComponentError, EnvironmentFault
from verbatim.core.imports import import_object, told
from verbatim.core.texts import shown
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Episode, Score
from verbatim.environments.reward_functions import Rewards
from verbatim.environments.rows import read_splits
from verbatim.environments.single_turn import opened_with, prompt_of
from verbatim.environments.tools import FunctionTool, ToolFailed, ToolResult
from verbatim.environments.tools.function_tool import as_result
from verbatim.environments.tools.threads import in_thread

NO_TOOLS = ("reset", "get_reward", "reward", "close")
"""Names of public methods that are not tools. `solution` is not a tool either if it takes no arguments."""
SEEDS = {"train": range(100), "eval": range(100, 150)}
"""Seeds by split. Without data, each of these seeds is an example."""


class ToolClass:
    """An environment made from a class whose `reset` begins an episode and whose other public methods are tools.

    Each episode creates its own object. `reset` gets each field of the row that is in its signature (all fields if it
    takes `**kwargs`), and also `seed` if the signature has it. The text that `reset` returns is appended to the user's
    message. The episode ends when the model answers without a tool call, or when the object's `done` is True. A
    ValueError in a tool is reported to the model. The reward comes from the `reward` functions, from the method
    `get_reward`, or from the method or attribute `reward`. At the end `close` is called, if the object has it. Methods
    that are not async run in threads.

    Args:
        environment: The class, a function that creates an object, or the import path of either.
        data: Rows, as for `SingleTurn`. If None, there are 100 seeds for training and 50 for evaluation instead.
        reward: Reward functions, as for `SingleTurn`. Functions written for TRL may take `environments`.
        prompt: The field with the prompt, if the data has such a field.
        user_prompt: The user's message if the data has no prompt.
        system_prompt: A system message in front of the user's message.
        eval_data: As for `SingleTurn`.
        eval_share: As for `SingleTurn`.
        weights: As for `SingleTurn`.
        args: Keyword arguments of the class.

    Raises:
        ComponentError: the class cannot be imported or instantiated, or has no tools or no reward.
        UsageError: the data cannot be read.
    """

    def __init__(
        self,
        environment: Any,
        data: Any = None,
        reward: Any = None,
        *,
        prompt: str = "prompt",
        user_prompt: str | None = None,
        system_prompt: str | None = None,
        eval_data: Any = None,
        eval_share: float = 0.1,
        weights: Sequence[float] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        make = maker(environment, args)
        self._make, self._name = make, name_of(environment)
        self._rewards = Rewards.of(reward, weights)
        self._prompt, self._user_prompt, self._system_prompt = prompt, user_prompt, system_prompt
        self._examples: Mapping[str, Sequence[Example]] = (
            {split: [Example(id=str(seed), payload={"seed": seed}) for seed in seeds] for split, seeds in SEEDS.items()}
            if data is None
            else read_splits(data, eval_data, prompt=prompt, eval_share=eval_share)
        )
        columns = self._examples["train"][0].payload
        self._rewards.check(columns, has_environments=True)
        self._check(made(make, self._name), columns)

    def _check(self, instance: Any, columns: Mapping[str, Any]) -> None:
        """Refuse a class that lacks `reset`, tools or a reward, or whose `reset` needs fields that the data lacks."""
        reset = getattr(instance, "reset", None)
        if not callable(reset):
            raise ComponentError(f"{self._name} has no reset; expected `def reset(self, **kwargs) -> str | None`")
        parameters = inspect.signature(reset).parameters.values()
        needed = {
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        if missing := sorted(needed - {*columns, "seed", "prompt"}):
            raise ComponentError(
                f"{self._name}.reset needs {', '.join(missing)}; fields of the data: "
                f"{', '.join(columns) or 'none'}; give data with these fields: "
                'data = "tasks.jsonl"'
            )
        if not _tools(instance, self._name):
            raise ComponentError(
                f"{self._name} has no tools; expected public methods besides {', '.join(NO_TOOLS)}, "
                "typed and with a docstring"
            )
        if not self._rewards.functions and not (
            callable(getattr(instance, "get_reward", None)) or hasattr(instance, "reward")
        ):
            raise ComponentError(
                f"{self._name} has no reward; expected a method get_reward() or an attribute reward (set in "
                '__init__), or a function: reward = "my_rewards.solved"'
            )
        close = getattr(instance, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows, or the seeds, of the split "train" or "eval" as examples."""
        return self._examples[split]

    async def start(self, example: Example, seed: int) -> Episode:
        """Create an object of the class, reset it, and return its episode."""
        instance = await in_thread(self._make)
        fields = {**example.payload, "prompt": prompt_of(example, self._prompt)}
        fields.setdefault("seed", seed)
        async with closed_on_failure(instance):
            observation = await called(functools.partial(instance.reset, **_taken(instance.reset, fields, example)))
            messages = self._opening(example, observation)
        return _ToolClassEpisode(self, instance, example, messages)

    def _opening(self, example: Example, observation: Any) -> list[Message]:
        messages = [*opened_with(self._system_prompt), *example.messages]
        if not example.messages and self._user_prompt is not None:
            messages.append({"role": "user", "content": self._user_prompt})
        return _with_observation(messages, observation, self._name)

    async def reward_of(self, instance: Any, trajectory: Trajectory, example: Example, num_opening: int) -> Score:
        """Return the reward of an episode that began with `num_opening` messages."""
        if self._rewards.functions:
            prompt = prompt_of(example, self._prompt)
            return await self._rewards.score(trajectory, example, prompt, num_opening=num_opening, environment=instance)
        given = getattr(instance, "get_reward", None) or instance.reward
        earned: Score = await called(given) if callable(given) else given
        return earned

    def tools_of(self, instance: Any) -> list[FunctionTool]:
        """Return the tools of an object. Each tool call also checks the object's `done`."""
        return _tools(instance, self._name)


class _ToolClassEpisode(Episode):
    def __init__(self, environment: ToolClass, instance: Any, example: Example, messages: Sequence[Message]) -> None:
        self._environment, self._instance, self._example = environment, instance, example
        self.messages, self.tools = messages, environment.tools_of(instance)
        if _has_solution(type(instance)):
            self.solution = instance.solution

    async def score(self, trajectory: Trajectory) -> Score:
        return await self._environment.reward_of(self._instance, trajectory, self._example, len(self.messages))

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if callable(close):
            await called(close)


def maker(environment: Any, args: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Return a function that creates the object of one episode, given a class, a function or an import path.

    Raises:
        ComponentError: the path cannot be imported, or `environment` is an object instead of a class.
    """
    make = import_object(environment) if isinstance(environment, str) else environment
    if not (inspect.isclass(make) or inspect.isroutine(make) or isinstance(make, functools.partial)):
        cls = type(make).__name__
        raise ComponentError(
            f"environment: found {shown(make, 80)}, an object of {cls}; expected the class {cls}: "
            "every episode creates its own object"
        )
    return functools.partial(make, **dict(args or {}))


def name_of(environment: Any) -> str:
    """Return the name of `environment` for error messages."""
    inner = environment.func if isinstance(environment, functools.partial) else environment
    return inner if isinstance(inner, str) else str(getattr(inner, "__name__", inner))


def made(make: Callable[[], Any], name: str) -> Any:
    """Create one object. An exception in its constructor becomes a ComponentError."""
    expected = "expected a class that can be made without arguments, or with those of args"
    with users_errors(lambda error: ComponentError(f"{name}() raised {told(error)}; {expected}")):
        return make()


@contextlib.asynccontextmanager
async def closed_on_failure(instance: Any) -> AsyncIterator[None]:
    """Context manager that closes an object if the block fails, because the rollout does not close an episode that
    never began."""
    try:
        yield
    except Exception:
        close = getattr(instance, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):  # the first failure is the one to report
                await called(close)
        raise


async def called(function: Callable[..., Any]) -> Any:
    """Call a user's function: in a thread if it is not async, since it may block; otherwise on the event loop."""
    inner = function.func if isinstance(function, functools.partial) else function
    value = function() if inspect.iscoroutinefunction(inner) else await in_thread(function)
    return await value if inspect.isawaitable(value) else value


def tool_methods(cls: type) -> list[str]:
    """Return the names of a class's public methods that are tools, in the order of definition."""
    names = {  # a dict keeps the order of definition; base classes come first
        name: None
        for base in reversed(cls.__mro__)
        if base is not object
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, staticmethod | classmethod)
    }
    no_tools = (*NO_TOOLS, "solution") if _has_solution(cls) else NO_TOOLS
    return [
        name for name in names if not name.startswith("_") and name not in no_tools and callable(getattr(cls, name))
    ]


def _has_solution(cls: type) -> bool:
    """Return True if `solution` is a method without arguments, which `verbatim env check` plays. With arguments it may
    be a tool."""
    solution = getattr(cls, "solution", None)
    return inspect.isfunction(solution) and len(inspect.signature(solution).parameters) == 1


class _Method(FunctionTool):
    """A method of the object as a tool. A ValueError in it is reported to the model. A call ends the episode if the
    object is done after the call."""

    def __init__(self, instance: Any, method: Callable[..., Any]) -> None:
        super().__init__(method)
        self._instance = instance

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        call = self._call(arguments)
        try:
            result = as_result(await called(call))
        except ValueError as error:
            raise ToolFailed(str(error)) from error
        is_done = result.done or getattr(self._instance, "done", False) is True
        return ToolResult(content=result.content, done=is_done, reward=result.reward)


def _tools(instance: Any, name: str) -> list[FunctionTool]:
    try:
        return [_Method(instance, getattr(instance, method)) for method in tool_methods(type(instance))]
    except ComponentError as error:
        raise ComponentError(f"{name}: {error}") from error


def _taken(reset: Callable[..., Any], fields: Mapping[str, Any], example: Example) -> dict[str, Any]:
    """Return the fields to pass to `reset`: the fields in its signature or, if it takes `**kwargs`, the prompt and all
    fields of the row, except the seed that Verbatim adds to each row."""
    parameters = inspect.signature(reset).parameters.values()
    names = {p.name for p in parameters}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {
        name: value
        for name, value in fields.items()
        if name in names or (takes_any and name in {*example.payload, "prompt"})
    }


def _with_observation(messages: list[Message], observation: Any, name: str) -> list[Message]:
    """Return the opening messages. The text that `reset` returned is appended to the last user message, as in TRL."""
    if observation is not None and not isinstance(observation, str):
        raise EnvironmentFault(f"{name}.reset returned {shown(observation)}; expected a string for the model, or None")
    if observation and messages and messages[-1]["role"] == "user":
        last = messages.pop()
        messages.append({"role": "user", "content": f"{last['content']}{observation}"})
    elif observation:
        messages.append({"role": "user", "content": observation})
    if not any(message["role"] == "user" for message in messages):
        raise EnvironmentFault(
            f"{name}.reset returned no text, and there is no prompt; return the task from reset, "
            'give data with a field prompt, or user_prompt = "..."'
        )
    return messages
