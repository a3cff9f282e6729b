"""What shuts a script in is tried out before it is trusted, and refused in words that help."""

import resource

import pytest

from verbatim.core.errors import UsageError
from verbatim.environments.tools import isolation as module
from verbatim.environments.tools.isolation import ISOLATIONS, Isolation, SandboxLimits, find_isolation, ulimits, why_not

pytestmark = pytest.mark.realtime


def running(*command: str, name: str = "paper") -> Isolation:
    return Isolation(name=name, command=lambda limits, script: [*command, script])


def test_this_machine_isolates_and_bubblewrap_comes_first():
    working = [isolation for isolation in ISOLATIONS if why_not(isolation) is None]
    assert working != [], "install bubblewrap from the distribution's packages"
    assert find_isolation() is working[0]
    assert [isolation.name for isolation in ISOLATIONS] == ["bubblewrap", "unshare"]


def test_an_isolation_that_isolates_nothing_is_found_out():
    assert why_not(running("bash", "-c")) == "it shares the user, mnt, pid, net, ipc, uts namespace"


def test_an_isolation_that_leaves_the_network_open_is_found_out():
    without = running(
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        "--fork",
        "--mount-proc",
        "bash",
        "-c",
    )
    assert why_not(without) == "it shares the net namespace"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["bash", "-c", "echo Permission denied >&2; exit 1"], "Permission denied"),
        (["bash", "-c", "exit 3"], "exit status 3"),
        (["no-such-program"], "No such file or directory: 'no-such-program'"),
    ],
)
def test_an_isolation_that_fails_says_why(command, problem):
    assert problem in why_not(running(*command))


def test_the_first_that_works_is_taken(monkeypatch):
    (works, *_) = [isolation for isolation in ISOLATIONS if why_not(isolation) is None]
    monkeypatch.setattr(module, "ISOLATIONS", (running("bash", "-c"), works))
    assert find_isolation() is works


def test_where_nothing_works_the_refusal_says_what_was_tried_and_what_to_type(monkeypatch):
    broken = running("bash", "-c", "echo not permitted >&2; exit 1", name="bubblewrap")
    monkeypatch.setattr(module, "ISOLATIONS", (broken, running("bash", "-c", name="unshare")))
    with pytest.raises(UsageError) as refused:
        find_isolation()
    said = str(refused.value)
    assert "bubblewrap: not permitted; unshare: it shares the user, mnt, pid" in said
    assert "`apt-get install bubblewrap`" in said
    assert "set unsafe_allow = true" in said


def test_unsafe_allow_gives_up_isolation_only_where_there_is_none(monkeypatch):
    assert find_isolation(unsafe_allow=True).has_namespaces
    monkeypatch.setattr(module, "ISOLATIONS", (running("bash", "-c"),))
    assert not find_isolation(unsafe_allow=True).has_namespaces


@pytest.mark.parametrize("limit", ["timeout", "cpu_seconds", "memory_mb", "processes", "disk_mb", "output_bytes"])
def test_a_limit_of_nothing_is_refused(limit):
    with pytest.raises(UsageError, match=f"{limit} = 0; expected a value above 0"):
        SandboxLimits(**{limit: 0})


def test_a_limit_above_what_this_process_may_set_is_lowered_to_that(monkeypatch: pytest.MonkeyPatch):
    """`ulimit` would fail, and with it every sandbox."""
    most = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_DATA: 64 << 20, resource.RLIMIT_NPROC: 10_000}
    monkeypatch.setattr(module.resource, "getrlimit", lambda kind: (0, most.get(kind, resource.RLIM_INFINITY)))
    limits = SandboxLimits(open_files=4096, memory_mb=4096, processes=32, cpu_seconds=7)
    set_limits = ulimits(limits, "open_files", "memory_mb", "processes", "cpu_seconds")
    assert set_limits == "ulimit -c 0 && ulimit -n 1024 -d 65536 -u 32 -t 7"
