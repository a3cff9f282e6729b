"""The fault campaigns: a short part of each runs with all tests, the whole by `make faults`."""

import dataclasses

import pytest


@dataclasses.dataclass
class Campaign:
    """One row of the table at the end."""

    name: str
    cases: int = 0
    wrong: int = 0
    note: str = ""

    def add(self, wrong: bool = False) -> None:
        """One more case; `wrong` where it did not end as promised."""
        self.cases += 1
        self.wrong += wrong


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A tiny run that was recorded from its start to its end."""
    from faults.recorded_runs import plain_run

    return plain_run(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The same, of a run that builds its model and warm-starts it."""
    from faults.recorded_runs import prepared_run

    return prepared_run(tmp_path_factory.mktemp("prepared"))


_campaigns = pytest.StashKey[dict[str, Campaign]]()


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="the fault campaigns as a whole, not their short part")


def pytest_configure(config):
    config.stash[_campaigns] = {}


@pytest.fixture(scope="session")
def whole(request) -> bool:
    """Whether the whole campaign is to run."""
    return request.config.getoption("--whole", default=False)


@pytest.fixture(scope="session")
def campaign(request):
    """`campaign("kills")` is that row of the table; its cases are counted by `add`."""
    rows = request.config.stash[_campaigns]
    return lambda name: rows.setdefault(name, Campaign(name))


@pytest.fixture(scope="session")
def each(whole):
    """`each(case, items)` calls `case(server, item)`: commands are run by warm servers, one or two at a time."""
    from faults.warm import servers

    with servers(2 if whole else 1) as each:
        yield each


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where the tiny runs of the campaigns are made."""
    from faults.tiny_places import Place

    return Place.make(tmp_path_factory.mktemp("tiny") / "place")


@pytest.fixture(scope="session")
def expected(place, each):
    """What every synchronous tiny run must come to: nothing happened to it."""
    from faults.tiny_places import imbalances

    run = place.new()
    (ended,) = each(lambda warm, _: place.run(warm, "one", run), [None])
    assert ended.status == 0, ended.said
    assert imbalances(run) == []
    return run


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_campaigns, {})
    if rows:
        terminalreporter.section("fault campaigns")
        for row in rows.values():
            terminalreporter.line(f"{row.name:<40} {row.cases:>6} cases {row.wrong:>4} wrong  {row.note}")
