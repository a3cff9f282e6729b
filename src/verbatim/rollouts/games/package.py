"""Finds the games of the package `textarena`, and checks what each game needs to be played."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.texts import error_text, nearest

INSTALL = "pip install 'verbatim-rl[environments]'"
WORD_LISTS = {
    "Codenames": ("corpora/words", "taggers/averaged_perceptron_tagger_eng"),
    "DontSayIt": ("corpora/words", "taggers/averaged_perceptron_tagger_eng"),
    "Hangman": ("corpora/words",),
    "LetterAuction": ("corpora/words",),
    "SpellingBee": ("corpora/words",),
    "WordChains": ("corpora/words",),
    "WordLadder": ("corpora/words",),
    "WordSearch": ("corpora/words",),
    "Wordle": ("corpora/words", "taggers/averaged_perceptron_tagger_eng"),
}
"""The word lists that games download with nltk, keyed by the game's folder in the package."""
JURIES = frozenset({"Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"})
"""Folders of the games in which models on OpenRouter judge or answer."""
MISSING_FILES = frozenset({"ScorableGames", "UsedCar", "UsedCarNegotiation"})
"""Folders of the games that read files that are missing from the published package."""
UNREADABLE = frozenset({"Klondike"})
"""Folders of the games whose published code is a syntax error in every Python version."""
_VARIANTS = ("-train", "-raw")
"""Suffixes of game ids. Games whose ids differ only in such a suffix differ only in how the package wraps their
observations. Here they are the same game, because the package's observation wrappers are not used."""


@dataclass(frozen=True, kw_only=True)
class GameSpec:
    """One game of the package `textarena`."""

    id: str
    """The game's id in the package, such as "TicTacToe-v0"."""
    kind: str
    """The folder of the game's code, such as "TicTacToe"."""
    module: str
    """The module of the game's code."""

    @property
    def needs(self) -> str | None:
        """Say what is missing to play the game; None if it can be played."""
        if self.kind in WORD_LISTS:
            lists = [name for name in WORD_LISTS[self.kind] if not _has_word_list(name)]
            names = " ".join(name.split("/")[1] for name in lists)
            how = f"word lists of nltk, to be downloaded once: python -m nltk.downloader {names}"
            return how if lists else None
        if self.kind in JURIES and not os.environ.get("OPENROUTER_API_KEY"):
            return "models on OpenRouter, which it calls itself: a key in OPENROUTER_API_KEY, and network access"
        if self.kind in MISSING_FILES:
            return "files that are missing from the published package"
        if self.kind in UNREADABLE:
            return "other code: the code in the package is not valid Python"
        return _python_for(self.module)


def find_game(game: str) -> GameSpec:
    """Find the game with this id, and check that it can be played here.

    Raises:
        UsageError: the package is not installed, the game does not exist, or it needs something that is missing.
    """
    known = games()
    if not known:
        raise UsageError(f"textarena needs the package textarena: {INSTALL}")
    for ending in _VARIANTS:
        game = game.removesuffix(ending)
    if game not in known:
        hint = nearest(game, known) or "."
        raise UsageError(f"textarena: the package has no game {game!r}{hint} `verbatim env list textarena` shows them")
    spec = known[game]
    if spec.needs is not None:
        raise UsageError(f"textarena: {game} needs {spec.needs}")
    return spec


@functools.cache
def games() -> Mapping[str, GameSpec]:
    """Return every game, keyed by its id; empty if the package is not installed."""
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError:
        return {}
    found = {}
    for name, entry in ENV_REGISTRY.items():
        if not name.endswith(_VARIANTS) and isinstance(entry.entry_point, str):
            module = entry.entry_point.split(":")[0]
            found[name] = GameSpec(id=name, kind=module.split(".")[2], module=module)
    return found


def make_game(spec: GameSpec, options: Mapping[str, Any]) -> tuple[Any, list[Callable[[str], str]]]:
    """Return (game, changes): a game without its wrappers, and the functions with which its wrappers change an action,
    in the order in which they are called.

    Raises:
        ComponentError: the package refuses the options, or cannot create the game.
    """
    import textarena

    try:
        with _nothing_fetched():
            env = textarena.make(spec.id, **options)
    except (TypeError, ValueError, AssertionError, ImportError, SyntaxError, OSError, LookupError) as error:
        raise ComponentError(
            f"textarena: the package cannot make {spec.id} with {dict(options)}: {error_text(error)}"
        ) from error
    changes: list[Callable[[str], str]] = []
    while isinstance(env, textarena.Wrapper):
        if isinstance(env, textarena.ActionWrapper):
            changes.append(env.action)
        env = env.env
    return env, changes


@contextlib.contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Context manager that disables nltk's downloads. Games download their word lists whenever they are created, even
    if the lists are already present."""
    import nltk

    download = nltk.download
    nltk.download = lambda *args, **kwargs: True
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some games print
            yield
    finally:
        nltk.download = download


def _has_word_list(name: str) -> bool:
    import nltk

    for ending in ("", ".zip"):
        with contextlib.suppress(LookupError):
            nltk.data.find(name + ending)
            return True
    return False


@functools.cache
def _python_for(module: str) -> str | None:
    """Explain why this Python cannot run a game's code; return None if it can. Some games need a newer Python. The code
    is parsed but not run."""
    import textarena

    path = Path(textarena.__path__[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "code that is missing from the published package"
    except SyntaxError:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"code that Python {version} can parse" + (": try Python 3.12" if sys.version_info < (3, 12) else "")
    return None
