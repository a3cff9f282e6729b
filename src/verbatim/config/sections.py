"""Defines what the tables of a run's file share: types of numbers, and the base classes of sections and plug-ins."""

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
    """A plug-in: `type` is the name of a built-in or the import path of your own; other keys are its parameters.
    Or `type = "custom"` with `import_path` and `kwargs`. Parameters are checked against the component's signature when
    it is resolved."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str = "default"
    """A name from the component's table, an import path ("my_module.my_loss"), or "custom"."""
    import_path: str | None = None
    """With "custom": `module.function`."""
    kwargs: dict[str, Any] = Field(default={}, exclude_if=lambda kwargs: not kwargs)
    """With "custom": keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.type == "custom":
            if not self.import_path:
                raise ValueError('type = "custom" needs import_path = "module.function"')
            if self.model_extra:
                names = ", ".join(self.model_extra)
                raise ValueError(f'{names}: with type = "custom" arguments go into kwargs = {{ ... }}')
        elif self.import_path is not None or self.kwargs:
            raise ValueError(f'import_path and kwargs belong to type = "custom", found type = "{self.type}"')
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments for the component."""
        return dict(self.kwargs) if self.type == "custom" else dict(self.model_extra or {})

    @property
    def custom_path(self) -> str | None:
        """The import path of a component of the user's own, in either spelling; None for a built-in."""
        return self.import_path or (self.type if is_import_path(self.type) else None)


class NamedComponents(Section):
    """A table whose keys beside its own are tables of components, each of which has its key as `type` where it has no
    other."""

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
"""From device to device, or from host memory to host memory."""


@dataclass(frozen=True, kw_only=True)
class BroadcastSettings:
    """How a trainer sends its weights to a sampler's servers."""

    kind: BroadcastKind
    urls: tuple[str, ...]
    """Addresses of servers that run already; empty: the run starts its own, beside the orchestrator."""
    address: str | None
    """An address of the trainer's host that they reach; None: found by the route to them."""
    seconds: float
    """Limit for each phase of an update."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Where the sampler computes."""

    count: int
    """Replicas, each with all weights."""
    devices_each: int
    """Devices that share one replica's weights."""
    dtype: str
    """Number format of weights and cache; the compiled kernel keeps its cache in float32."""
    most_sequences: int
    """Sequences that one replica decodes together at most."""
    memory_share: float
    """Share of a device's memory that it may take."""
    packs: bool = False
    """Whether the embedded sampler's compiled kernel computes there, where it can compute the model."""


class BackendSettings(Section):
    """The table of one backend: a subclass has its keys as fields."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """What a sampler computes in; the default of inference.canary_tolerance depends on it."""
        return "float32"

    @property
    def shares_device(self) -> bool:
        """Whether a sampler takes turns with the trainer on one device: it has `sleep`, and sleeps while the trainer
        trains."""
        return False

    def cuda_devices(self) -> tuple[str, ...]:
        """The CUDA devices that processes of a sampler's own take where there is CUDA, as CUDA_VISIBLE_DEVICES names
        them. Empty: it has no such processes, or they take none."""
        return ()

    @property
    def broadcast(self) -> BroadcastSettings | None:
        """How the trainer sends its weights to the sampler's servers; None: they read what it publishes."""
        return None

    def planned(self) -> Replicas:
        """What `verbatim plan` counts with."""
        return Replicas(count=1, devices_each=1, dtype=self.precision, most_sequences=256, memory_share=1.0)

    def check(self) -> None:
        """Refuse, before a run starts, what cannot work on this machine: a device or package that is not there.

        Raises:
            UsageError: what was found, what was expected; a key first ("device: ...").
        """

    def check_for(self, *, context_length: int, adapter_rank: int | None) -> None:
        """Refuse, before a run starts, a run that a sampler of these settings cannot serve.

        Args:
            context_length: Most tokens of prompt and completion together that the run asks for.
            adapter_rank: Rank of the low-rank adapters that updates bring; None: they bring whole weights.

        Raises:
            UsageError: as `check`.
        """


class BackendSection(Section):
    """A section with a `backend`, whose own settings stand in the table of its name.

    Which tables there are, `config.backends.schema_with_backends` says; read without it, they are kept as they are.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    what: ClassVar[str]
    """The kind of backend, for errors."""
    backend: str
    """A name from the table of backends, or an import path."""
