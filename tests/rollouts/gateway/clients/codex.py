"""OpenAI's coding agent, codex, in a folder of its own, where the scripted model runs a command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = f"""
model = "policy"
model_provider = "gateway"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.gateway]
name = "gateway"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""

example = json.loads(sys.stdin.readline())
with tempfile.TemporaryDirectory() as folder:
    home, place = Path(folder, "home"), Path(folder, "place")
    home.mkdir()
    place.mkdir()
    Path(home, "config.toml").write_text(CONFIG)
    command = [
        os.environ["CODEX"],
        "exec",
        "--json",
        "--skip-git-repo-check",
        "--sandbox",
        "danger-full-access",
        *example.get("options", []),
        "-C",
        str(place),
        "Say hello.",
    ]
    ended = subprocess.run(
        command, env={**os.environ, "CODEX_HOME": str(home)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(ended.stdout[-2000:] + ended.stderr[-2000:])
    print(float("scripted model" in ended.stdout and Path(place, "out.txt").read_text() == "42\n"))
