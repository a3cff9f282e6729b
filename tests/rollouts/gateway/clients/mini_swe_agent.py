"""mini-swe-agent's loop with bash in a folder of its own, over litellm: tools, Responses, or commands in the text."""

import json
import os
import sys
import tempfile

example = json.loads(sys.stdin.readline())
with tempfile.TemporaryDirectory() as folder:
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": folder}
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    kind = example.get("kind", "litellm")
    name = "mini_textbased.yaml" if kind == "litellm_textbased" else "mini.yaml"
    config = yaml.safe_load((builtin_config_dir / name).read_text())
    settings = {**config["model"], "model_class": kind, "model_kwargs": {"drop_params": True}}
    own = {k: v for k, v in config["agent"].items() if k in ("system_template", "instance_template")}
    agent = DefaultAgent(get_model("openai/gpt-4o", settings), LocalEnvironment(cwd=folder), step_limit=8, **own)
    result = agent.run("Say hello.")
print(float(result["exit_status"] == "Submitted" and "42" in str(agent.messages)))
