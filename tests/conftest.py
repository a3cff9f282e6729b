"""One thread for torch: the tests' models are so small that a second one only waits for the first.

Hypothesis draws the same examples in every run, however slow the machine; `--hypothesis-profile=searching` draws
others. `--whole` runs campaigns whole (campaigns.py).
"""

import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Ray waits until it knows how an actor ended. By default it waits one second, then says that it is "unavailable".
os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "300000")
# By default Ray's workers run at nice 15, and make little progress beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

import frozen
import warm
from campaigns import Campaign, CampaignTable, set_whole
from durations import DurationsTable
from longest import longest_first
from realtime import RealtimeCheck
from token_identity import watched
from verbatim.core import imports
from waiting import HANGS

settings.register_profile("searching", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Hypothesis also draws numbers that stand in modules of ours, so what it draws would depend on which of them an earlier
# test has imported.
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="campaigns as a whole, not their small part")
    parser.addoption("--where-time-goes", action="store_true", help="a table of seconds at the end")
    parser.addoption("--check-realtime", action="store_true", help="refuse tests that lack the marker realtime")


def pytest_configure(config: pytest.Config) -> None:
    """Shells let what they start in the background ignore Ctrl-C; tests send it to themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    set_whole(config.getoption("--whole"))
    config.pluginmanager.register(frozen)
    config.pluginmanager.register(CampaignTable())
    if config.getoption("--where-time-goes"):
        config.pluginmanager.register(DurationsTable())
    if config.getoption("--where-time-goes") or config.getoption("--check-realtime"):
        config.pluginmanager.register(RealtimeCheck(refuse=config.getoption("--check-realtime")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The fixtures of a test draw the same numbers from torch and NumPy, whichever tests ran before it in its worker.

    Those of `random` are left alone: Ray picks ports by them, and workers must not all pick the same.
    """
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """The same for the test itself, whichever of its fixtures stood before it."""
    pytest_runtest_setup()


@pytest.hookimpl(trylast=True)  # once the tests that are not wanted are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker of pytest-xdist begins with tests that take long."""
    if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = longest_first(items, num_workers)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether campaigns run whole."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session", autouse=True)
def commands_are_warm() -> Iterator[None]:
    """`python -m verbatim.cli ...` is forked from a process that has imported everything (warm.py)."""
    with warm.commands():
        yield


@pytest.fixture
def nothing_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env check` blames no code for its time: on a busy machine any code may take long on the clock."""
    monkeypatch.setattr("verbatim.inspection.envcheck.watch.BLOCKED", HANGS)


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Campaign]]:
    """`campaign("kills")` is that row of the table at the end; its cases are counted by `add`."""
    rows: dict[str, Campaign] = {}
    yield lambda name: rows.setdefault(name, Campaign(name))
    request.node.user_properties += [("campaign", vars(row)) for row in rows.values()]


@pytest.fixture(autouse=True, scope="module")
def modules_beside_a_file_are_forgotten() -> Iterator[None]:
    """A run stores the folders in which modules were found beside configurations of earlier tests, too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(imports, "_BESIDE", list(imports._BESIDE))
        patched.setattr(imports, "_FILES_IN", set(imports._FILES_IN))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that gives torch more threads does not leave them to the next one."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def every_episode_is_token_exact() -> Iterator[None]:
    """Whatever episode a test plays, it is held against what its sampler returned."""
    with watched() as watch:
        yield
    assert watch.wrong == []
