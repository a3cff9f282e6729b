"""Defines the exceptions that Verbatim raises, in one hierarchy.

```
VerbatimError
├── UsageError (ValueError)      a person's mistake: what was found, what was expected, what to type
│   ├── ConfigError              in a TOML file or a command-line override
│   ├── ModelError               a model folder or id that cannot be loaded, or does not support what is asked of it
│   ├── ComponentError           a plug-in that cannot be imported or called, or that returned the wrong thing
│   ├── NoDemonstrations         an environment without demonstrations for these settings
│   └── CheckpointError          a checkpoint that is missing, damaged, or of another run
│       └── FormatError          a file in a format that this version does not read
├── RolloutError                 bad data from a rollout: kept on its trajectory and counted; the run goes on
│   ├── RecordError (ValueError) ids, logprobs or turns that cannot come from a sampler
│   │   └── NoFlatList (KeyError)    a trajectory with a break or without token ids was asked for a flat list of ids
│   ├── EnvironmentFault         an environment or a tool raised, hung, or returned something impossible
│   │   ├── JudgeFailed          a judge gave no verdict
│   │   └── ProgramFault         an agent program crashed, hung, or never called the model
│   ├── NothingSampled           an episode that ended before the policy had sampled a token
│   ├── TemplateFault            a chat template that did not end within its budget
│   └── SamplerFault             an inference engine failed for good on one request
└── RunStopped                   the run cannot usefully go on (every rollout fails, the loss is NaN)
    ├── CheckpointNotWritten     the disk or the trainer refused; earlier checkpoints are untouched
    ├── EngineDead               the inference engine can no longer answer any request
    ├── NothingToSample          every example is in a difficulty pool: the run has reached its end
    ├── NothingTrained           the run has ended without training on a single token
    └── StoppedByAlarm           an alarm that ends the run was raised
```

A broken invariant of our own (the ledger does not add up, a token trained twice) is an `AssertionError`:
a crash, never a warning.
"""


class VerbatimError(Exception):
    """Base class of everything that Verbatim raises on purpose."""


class UsageError(VerbatimError, ValueError):
    """A person's mistake; the message has what was found, what was expected and what to type."""


class ConfigError(UsageError):
    """A configuration file or override is wrong; the message names file, line and key."""


class ModelError(UsageError):
    """A model cannot be loaded, or does not support what is asked of it."""


class ComponentError(UsageError):
    """A plug-in cannot be imported or called, or returned the wrong thing."""


class NoDemonstrations(UsageError):
    """An environment that provides demonstrations has no demonstrations with these settings."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class FormatError(CheckpointError):
    """A file of a run has a format that this version of Verbatim does not read.

    Args:
        message: Names the file, the format number found and the format number expected.
        number: The number found, or None if the file has no format number.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


class RolloutError(VerbatimError):
    """Bad data from one rollout. It stays on its trajectory and is counted; the run goes on."""


class RecordError(RolloutError, ValueError):
    """Ids, logprobs or turns that cannot come from a sampler."""


class NoFlatList(RecordError, KeyError):
    """The trajectory has no flat list of this name, because it has a break or no token ids."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class EnvironmentFault(RolloutError):
    """An environment or a tool raised, hung, or returned something impossible."""


class JudgeFailed(EnvironmentFault):
    """A judge or a reward model gave no verdict, so its episode has failed and has no reward."""


class ProgramFault(EnvironmentFault):
    """An agent program crashed, hung, or never called the model.

    Args:
        kind: "program_crashed", "program_hung" or "program_silent"; the episode is counted under this kind.
        message: What was observed.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NothingSampled(RolloutError):
    """An episode ended before the policy had sampled a token, so its reward is not the policy's."""


class TemplateFault(RolloutError):
    """A chat template did not end within its budget of steps, text and time."""


class SamplerFault(RolloutError):
    """An inference engine failed for good on one request.

    Args:
        message: What happened.
        num_tokens: Number of tokens sampled for the request so far, if the engine knows.
        num_lost_tokens: Number of tokens sampled for the request by replicas that then failed or were removed, if
            known.
    """

    def __init__(self, message: str = "", *, num_tokens: int = 0, num_lost_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.num_lost_tokens = num_lost_tokens


class RunStopped(VerbatimError):
    """The run stops, because continuing it would be useless; the message says why."""


class CheckpointNotWritten(RunStopped):
    """A checkpoint could not be written; the message names the checkpoint and the reason."""


class EngineDead(RunStopped):
    """The inference engine can no longer answer any request; the message has the reason."""


class NothingToSample(RunStopped):
    """Every example is in a difficulty pool: the run has reached its end."""


class NothingTrained(RunStopped):
    """The run has ended without training on a single token; the message names the reason for which the tokens were
    dropped."""


class StoppedByAlarm(RunStopped):
    """An alarm listed in `stop` of [monitor.alarms] was raised: the run ended early, with a checkpoint."""
