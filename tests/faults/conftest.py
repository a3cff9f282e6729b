"""What the campaigns of faults share: a server, recorded runs, tiny runs."""

import pytest


@pytest.fixture(scope="session")
def each(whole):
    """`each(case, items)` calls `case(server, item)`: commands are run by forking servers, one or two at a time."""
    from faults.struck import servers

    with servers(2 if whole else 1) as each:
        yield each


@pytest.fixture(scope="session")
def plain(tmp_path_factory, each):
    """A tiny run that was recorded from its start to its end."""
    from faults.recorded_runs import plain_run

    return each(plain_run, [tmp_path_factory.mktemp("plain")])[0]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, each):
    """The same, of a run that builds its model and warm-starts it."""
    from faults.recorded_runs import prepared_run

    return each(prepared_run, [tmp_path_factory.mktemp("prepared")])[0]


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
    (ended,) = each(lambda server, _: place.run(server, "one", run), [None])
    assert ended.status == 0, ended.said
    assert imbalances(run) == []
    return run
