"""The commands of Ray that the documentation shows have the options that it types."""

import re

import pytest

from docs_pages import PAGES, lines_of


@pytest.mark.extras
def test_ray_knows_what_the_documentation_types():
    from ray.dashboard.modules.job.cli import submit
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    commands = {"start": start, "symmetric-run": symmetric_run, "job submit": submit}
    options = {name: {option for p in command.params for option in p.opts} for name, command in commands.items()}
    options["symmetric-run"] |= options["start"] - {"--head", "--node-ip-address", "--port", "--block"}
    found = {}
    for page in PAGES:
        for line in lines_of(page.read_text("utf-8")):
            called = re.search(r"\bray (start|symmetric-run|job submit) (--.*)", line)
            if called is not None:
                typed = re.findall(r"--[a-z-]+", called[2].partition(" -- ")[0])
                found.setdefault(called[1], set()).update(typed)
    assert {name: typed - options[name] for name, typed in found.items() if typed - options[name]} == {}
    assert found.keys() == commands.keys()
