"""Writes the run with five planted faults as a run folder, for `verbatim view`: can each be found on the page?

Its environments have names that say nothing of the faults; `ANSWERS` says which is which.

    python tests/faults/planted_run.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from byte_renderer import CALL, CALL_END, END, ROLES
from faults.five_faults import HEALTHY, NAMED_BY, Watched, play
from verbatim.logs.monitors.alarm_log import AlarmLog
from verbatim.logs.monitors.alarms import AlarmWatch
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder

ANSWERS = {
    "dead_parser": "rooms",
    "stripped_thinking": "riddles",
    "stale_sampler": "greetings",
    "hackable_reward": "jokes",
    "always_fails": "orders",
    HEALTHY[0]: "answers",
    HEALTHY[1]: "questions",
}
"""The environment of each fault, and two without one."""
STEPS = 40


class Written(Watched):
    """Writes every step as a run does."""

    def __init__(self, watch: AlarmWatch, folder: Path) -> None:
        super().__init__(watch)
        self.files, self.metrics = OutcomeFolder(folder / "trajectories"), MetricsLog(folder / "metrics.jsonl")
        self.alarm_log = AlarmLog(folder / "alarms.jsonl")

    def keep(self, step, metrics, outcomes, alarms):
        self.metrics.on_step(step, metrics)
        self.files.write(step, outcomes)
        for alarm in alarms:
            self.alarm_log.on_alarm(alarm)


def write_tokenizer(folder: Path) -> None:
    """The tokenizer whose ids are those of `ByteRenderer`."""
    bytes_of = {chr(code): code for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = iter(range(256, 512))
    spelled = set(bytes_of.values())
    bytes_of |= {chr(next(others)): code for code in range(256) if code not in spelled}  # as GPT-2 spells them
    tokenizer = Tokenizer(BPE(vocab=bytes_of, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = {
        **{f"<|{role}|>": number for role, number in ROLES.items()},
        "<|end|>": END,
        "<call>": CALL,
        "</call>": CALL_END,
    }
    for marker, number in sorted(markers.items(), key=lambda pair: pair[1]):
        tokenizer.add_special_tokens([AddedToken(marker, special=True)])
        assert tokenizer.token_to_id(marker) == number
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_run(folder: Path, steps: int = STEPS, kinds: tuple[str, ...] = tuple(ANSWERS)) -> Written:
    """The run folder, with environments of these kinds; what is there already is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    write_tokenizer(folder / "model")
    environments = "".join(f'[[orchestrator.train.env]]\nid = "{name}"\n' for name in map(ANSWERS.get, kinds))
    config = f'name = "planted"\nmax_steps = {steps}\n[model]\nname = "model"\n{environments}'
    (folder / "config.toml").write_text(config)
    with TemporaryDirectory() as trainer:
        notes = play(Path(trainer), kinds, steps, labels=ANSWERS, observer=lambda watch: Written(watch, folder))
    assert isinstance(notes, Written)
    notes.metrics.close()
    notes.alarm_log.close()
    return notes


if __name__ == "__main__":
    written = write_run(Path(sys.argv[1]))
    for fault, alarm in NAMED_BY.items():
        print(f"{ANSWERS[fault]}: {fault} ({alarm})")
    print(*(f"{alarm.step} {alarm.name} {alarm.env} {alarm.state}" for alarm, _ in written.alarms), sep="\n")
