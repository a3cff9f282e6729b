"""Fifty trajectories whose texts try to be more than text, and a run folder whose every name does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from viewer_runs import make_run, trained, trajectory

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import ToolCall, Trajectory, Turn
from verbatim.logs.monitors.jsonl import JsonlWriter

ELSEWHERE = "https://elsewhere.invalid"
"""No page may ask for it."""
LONG = 10_000_000
"""Characters of one turn."""

TEXTS: tuple[str, ...] = (
    # programs
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    "</SCRIPT ><script >window.hacked = 3</script >",
    "<!--<script>window.hacked = 4</script>",
    "</title></style></textarea></template><script>window.hacked = 5</script>",
    "<img src=x onerror=window.hacked=6>",
    f"<img src={ELSEWHERE}/a.png>",
    "<svg onload=window.hacked=7>",
    "<svg><animate onbegin=window.hacked=8 attributeName=x dur=1s>",
    "<svg xmlns='http://www.w3.org/2000/svg'><foreignObject><body onload='window.hacked=9'/></foreignObject></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.hacked=10&gt;'>",
    "<iframe srcdoc='<script>parent.hacked=11</script>'></iframe>",
    f"<iframe src={ELSEWHERE}></iframe>",
    "<object data='data:text/html,<script>window.hacked=12</script>'></object>",
    "<details open ontoggle=window.hacked=13>",
    "<video><source onerror=window.hacked=14></video>",
    "<input autofocus onfocus=window.hacked=15>",
    "<body onload=window.hacked=16>",
    "<marquee onstart=window.hacked=17>",
    f"<link rel=stylesheet href={ELSEWHERE}/a.css><style>@import '{ELSEWHERE}/b.css'; * {{ display: none }}</style>",
    f"<base href={ELSEWHERE}><a href=x>link</a>",
    f"<meta http-equiv=refresh content='0;url={ELSEWHERE}'>",
    f"<form action={ELSEWHERE}><button autofocus>send</button></form>",
    "javascript:window.hacked=18",
    "data:text/html,<script>window.hacked=19</script>",
    f"[click](javascript:window.hacked=20) ![]({ELSEWHERE}/c.png) <{ELSEWHERE}>",
    f"[x]: {ELSEWHERE} 'onmouseover=window.hacked=21'",
    "{{constructor.constructor('window.hacked=22')()}} ${window.hacked=23} <%= hacked %> #{hacked}",
    "\"'`><x onclick=window.hacked=24>",
    "' style='position:fixed;inset:0;background:red' x='",
    "&lt;script&gt;window.hacked=25&lt;/script&gt; &#60;b&#62; &amp;amp;",
    "]]><![CDATA[<script>window.hacked=26</script>",
    "<custom-element></custom-element><slot></slot><template shadowrootmode=open><script>hacked=27</script></template>",
    # texts that hide
    "\u202egnp.exe\u202c \u2066left\u2069 \u2067right\u2069 \u200e\u200f\u061c",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg",
    "Z" + "\u0300\u0489\u20dd" * 500,
    "שלום عالم " * 50,
    "\U000e0041\U000e0042 tags, \ufffe \uffff \U0010ffff nothing",
    "line\u2028separator\u2029paragraph\u0085next\x0bvertical\x0cform",
    # terminals
    "\x1b[2J\x1b[H\x1b[31mred\x1b[0m\x1b]0;title\x07",
    f"\x1b]8;;{ELSEWHERE}\x1b\\link\x1b]8;;\x1b\\ \x9b31m \x90q\x9c",
    "\x00\x01\x08\x7f\r overwritten\rby this",
    # what encoders dislike
    "\ud800 alone \udfff, \udce9 and backwards \udc00\ud800",
    '\\u0000 \\ud800 \\\\ \\" \\x1b',
    "__proto__",
    "constructor",
    "-0 NaN Infinity 1e999",
    # size
    "x" * LONG,
    "W" * 20_000 + "<script>window.hacked=28</script>",
    "\n" * 50_000,
)
assert len(TEXTS) == 50


def hostile_trajectory(index: int, text: str) -> Trajectory:
    """The text wherever a text can stand."""
    short = text[:2_000]
    calls = [ToolCall(name=short, arguments={short: short}, status="invalid_json", raw=text[:100_000], id=short)]
    turns = (
        Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-1.0], agent=short, state_key=short, tool_calls=calls),
        Turn(prompt_ids=[1, 9], completion_ids=[4], agent=short),
    )
    messages: tuple[dict[str, Any], ...] = (
        {"role": "user", "content": text},
        {"role": short, "content": [{"type": "text", "text": short}], short: short, "name": short},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": short,
            "tool_calls": [
                {"id": short, "type": "function", "function": {"name": short, "arguments": json.dumps({"a": short})}},
                {"function": None},
                "no object",
            ],
        },
        {"role": "tool", "content": short, "tool_call_id": short},
        {},
    )
    tools = ({"type": "function", "function": {"name": short, "description": short, "parameters": {short: short}}},)
    return trajectory(
        f"t{index}",
        example_id=short,
        env=short,
        group_id=short,
        turns=turns,
        messages=messages,
        tools=tools,
        info={short: {short: [short]}, "task": {"x": None}},
        error=short,
        reward=float(index),
        reward_parts={short: 1.0},
        agent_rewards={short: 1.0},
        run_id=short,
        sample_index=index,
    )


def make_hostile_run(folder: Path) -> Path:
    """All of them in one step, once as training and once as an evaluation; metrics, alarms and texts of the run too."""
    all_of_them = [hostile_trajectory(index, text) for index, text in enumerate(TEXTS)]
    outcomes = [
        TrajectoryOutcome(trajectory=each, turns=("trained", f"filter:{each.env}"), flags=(each.env,))
        for each in all_of_them
    ]
    outcomes[3] = trained(all_of_them[3])
    script = TEXTS[1]
    make_run(
        folder,
        {1: outcomes},
        evaluated={1: all_of_them},
        metrics=[(1, {script: 1.0, "reward/mean": 0.5, "loss": float("nan"), TEXTS[33]: float("inf")})],
        config=f"name = {json.dumps(script)}\nmax_steps = 3\n[model]\nname = {json.dumps(TEXTS[5])}\n",
    )
    alarms = JsonlWriter(folder / "alarms.jsonl")
    alarms.write(
        {
            "name": script,
            "step": 1,
            "state": "raised",
            "message": TEXTS[5],
            "cause": TEXTS[7],
            "advice": TEXTS[25],
            "evidence": {script: 1.0},
            "env": script,
            "trajectory_ids": [script, "t5"],
        }
    )
    alarms.close()
    (folder / "summary.txt").write_text("\n".join([script, TEXTS[39], TEXTS[5]]))
    return folder
