"""Defines number types and the base classes for the tables of a run's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verbatim.core.imports import is_import_path

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class ComponentConfig(BaseModel):
    """A plug-in. `type` is the name of a built-in or the import path of your own, and all other keys are its
    parameters; or `type` is "custom", with `import_path` and `kwargs`. Parameters are checked against the component's
    signature when the component is resolved."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str = "default"
    """A name from the component's table, an import path ("my_module.my_loss"), or "custom"."""
    import_path: str | None = None
    """The import path `module.function`; only for type = "custom"."""
    kwargs: dict[str, Any] = Field(default={}, exclude_if=lambda kwargs: not kwargs)
    """Keyword arguments of the function; only for type = "custom"."""

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.type == "custom":
            if not self.import_path:
                raise ValueError('type = "custom" needs import_path = "module.function"')
            if self.model_extra:
                names = ", ".join(self.model_extra)
                raise ValueError(f'{names}: with type = "custom", put arguments into kwargs = {{ ... }}')
        elif self.import_path is not None or self.kwargs:
            raise ValueError(f'import_path and kwargs belong to type = "custom", found type = "{self.type}"')
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments for the component."""
        return dict(self.kwargs) if self.type == "custom" else dict(self.model_extra or {})

    @property
    def custom_path(self) -> str | None:
        """The import path of a user's own component, in either notation, or None for a built-in."""
        return self.import_path or (self.type if is_import_path(self.type) else None)


class NamedComponents(Section):
    """A table in which all keys other than its fields are tables of components. A component's `type` defaults to its
    key."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _named_by_their_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value if key in cls.model_fields else cls._table(key, value) for key, value in data.items()}

    @classmethod
    def _table(cls, key: str, value: Any) -> Any:
        return {"type": key, **value} if isinstance(value, dict) else value


def table_of(backend: str) -> str:
    """The key of a backend's own table: its name, or the last part of its import path.

    >>> table_of("torch"), table_of("my_module.MySampler")
    ('torch', 'MySampler')
    """
    return backend.replace(":", ".").rpartition(".")[2]


BroadcastKind = Literal["nccl", "gloo"]
"""Weights are sent from device to device (NCCL) or from host memory to host memory (Gloo)."""


@dataclass(frozen=True, kw_only=True)
class BroadcastSettings:
    """How the trainer broadcasts its weights to the sampler's servers."""

    kind: BroadcastKind
    urls: tuple[str, ...]
    """URLs of servers that are already running. If empty, the run starts its own servers, next to the orchestrator."""
    address: str | None
    """Address under which the servers reach the trainer's host; None to derive it from the route to the servers."""
    seconds: float
    """Timeout of each phase of an update, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The sampler's resources: number of replicas, devices, precision and memory."""

    count: int
    """Number of replicas, each with a full copy of the weights."""
    devices_each: int
    """Number of devices that share one replica's weights (tensor parallelism)."""
    dtype: str
    """Number format of weights and cache; the compiled kernel keeps its cache in float32 in any case."""
    most_sequences: int
    """Maximum number of sequences that one replica decodes at a time."""
    memory_share: float
    """Share of a device's memory that one replica may use, from 0 to 1."""
    packs: bool = False
    """True if the embedded sampler uses its compiled kernel for models that the kernel supports."""


class BackendSettings(Section):
    """The settings of one backend: the fields of a subclass are the keys of the backend's table."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """The sampler's precision; the default of inference.canary_tolerance depends on it."""
        return "float32"

    @property
    def shares_device(self) -> bool:
        """True if the sampler and the trainer take turns on one device (device handoff). The sampler then has `sleep`,
        and sleeps while the trainer trains."""
        return False

    def cuda_devices(self) -> tuple[str, ...]:
        """The CUDA devices used by the sampler's own processes, in the notation of CUDA_VISIBLE_DEVICES. Empty if the
        sampler has no processes of its own, or if they use no device."""
        return ()

    @property
    def broadcast(self) -> BroadcastSettings | None:
        """How the trainer broadcasts weights to the sampler's servers; None if the servers read the published files."""
        return None

    def planned(self) -> Replicas:
        """The sampler's resources, from which `verbatim plan` estimates memory and speed."""
        return Replicas(count=1, devices_each=1, dtype=self.precision, most_sequences=256, memory_share=1.0)

    def check(self) -> None:
        """Refuse settings that cannot work on this machine, such as a missing device or package, before a run starts.

        Raises:
            UsageError: a setting cannot work; the message says what was found and what was expected, and starts with
                the key ("device: ...").
        """

    def check_for(self, *, context_length: int, adapter_rank: int | None) -> None:
        """Before a run starts, refuse the run if a sampler with these settings cannot serve it.

        Args:
            context_length: Maximum number of tokens in prompt and completion together.
            adapter_rank: Rank of the low-rank adapters in weight updates; None if updates carry full weights.

        Raises:
            UsageError: as for `check`.
        """


class BackendSection(Section):
    """A section with a key `backend`. The selected backend's own settings are in the table with the backend's name.

    The backends' own tables are not validated here: `config.backends.schema_with_backends` adds their types to the
    schema.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    what: ClassVar[str]
    """The kind of backend, for error messages."""
    backend: str
    """A name from the table of backends, or an import path."""
