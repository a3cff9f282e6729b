"""Defines the exceptions that Verbatim raises, in one hierarchy.

```
VerbatimError
├── UsageError (ValueError)      a person can mend it: says what was found, what was expected, what to type
│   ├── ConfigError              a TOML file or a command-line override
│   ├── ModelError               a model folder or id that cannot be loaded, or that cannot do what is asked
│   ├── ComponentError           a plug-in that cannot be imported, called, or that returned the wrong thing
│   ├── NoDemonstrations         an environment that shows none with these settings
│   └── CheckpointError          a checkpoint that is missing, damaged, or of another run
│       └── FormatError          a file in a format that this version does not read
├── RolloutError                 bad data from a rollout: kept on its trajectory, counted, the run goes on
│   ├── RecordError (ValueError) ids, logprobs or turns that cannot be what a sampler returned
│   │   └── NoFlatList (KeyError)    one list of a trajectory's ids, where it has two contexts or no ids
│   ├── EnvironmentFault         an environment or a tool raised, hung, or returned something impossible
│   │   ├── JudgeFailed          a judge gave no verdict
│   │   └── ProgramFault         an agent program crashed, hung, or never called the model
│   ├── NothingSampled           an episode ended before the policy had sampled a token of its own
│   ├── TemplateFault            a chat template did not come to an end within its budget
│   └── SamplerFault             an inference engine failed for good on one request
└── RunStopped                   the run cannot usefully go on (every rollout fails, a loss that is no number)
    ├── CheckpointNotWritten     the disk or the trainer refused; the checkpoints before it are untouched
    ├── EngineDead               the inference engine can answer nothing any more
    ├── NothingToSample          every example is in a difficulty pool: the run has reached its end
    ├── NothingTrained           the run has reached its end, and has learned from no token
    └── StoppedByAlarm           an alarm was raised that is to end the run
```

A broken invariant of our own (the ledger does not add up, a token trained twice) is an `AssertionError`:
a crash, never a warning.
"""


class VerbatimError(Exception):
    """Base of everything raised on purpose."""


class UsageError(VerbatimError, ValueError):
    """A person can mend it; the message says what was found, what was expected and what to type."""


class ConfigError(UsageError):
    """A configuration file or override is wrong; names file, line and key."""


class ModelError(UsageError):
    """A model cannot be loaded, or cannot do what is asked of it."""


class ComponentError(UsageError):
    """A plug-in cannot be imported or called, or returned the wrong thing."""


class NoDemonstrations(UsageError):
    """An environment has demonstrations, but none with these settings."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class FormatError(CheckpointError):
    """A file of a run has a format that this version of Verbatim does not read.

    Args:
        message: Which file it is, which number was found, and which is expected.
        number: The number that was found, or None if the file has no number.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


class RolloutError(VerbatimError):
    """Bad data from one rollout. It stays on its trajectory and is counted; the run goes on."""


class RecordError(RolloutError, ValueError):
    """Ids, logprobs or turns that cannot be what a sampler returned."""


class NoFlatList(RecordError, KeyError):
    """A trajectory with a break, or without token ids, has no flat list of this name."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class EnvironmentFault(RolloutError):
    """An environment or a tool raised, hung, or returned something impossible."""


class JudgeFailed(EnvironmentFault):
    """A judge or a reward model gave no verdict: its episode has failed, and has no reward."""


class ProgramFault(EnvironmentFault):
    """An agent program crashed, hung, or never called the model.

    Args:
        kind: "program_crashed", "program_hung" or "program_silent": what the episode is counted as.
        message: What was seen.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NothingSampled(RolloutError):
    """An episode ended before the policy had sampled a token of its own: what it earned is not the policy's."""


class TemplateFault(RolloutError):
    """A chat template did not come to an end within its budget of steps, text and time."""


class SamplerFault(RolloutError):
    """An inference engine failed for good on one request.

    Args:
        message: What happened.
        num_tokens: Drawn for the request until then, where the engine knows.
        num_lost_tokens: Drawn for it before by replicas that were lost, where that is known.
    """

    def __init__(self, message: str = "", *, num_tokens: int = 0, num_lost_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.num_lost_tokens = num_lost_tokens


class RunStopped(VerbatimError):
    """The run cannot usefully go on; the message says why."""


class CheckpointNotWritten(RunStopped):
    """A checkpoint could not be written; the message names it and the reason."""


class EngineDead(RunStopped):
    """The inference engine can answer nothing any more; the message says why."""


class NothingToSample(RunStopped):
    """Every example is in a difficulty pool: the run has reached its end."""


class NothingTrained(RunStopped):
    """The run has reached its end and has learned from no token; the message says which reason took them."""


class StoppedByAlarm(RunStopped):
    """An alarm was raised that [monitor.alarms] names under `stop`: the run has ended early, with a checkpoint."""
