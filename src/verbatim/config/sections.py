"""What every table of a run's file is made of: types of numbers, and the shapes of a section and of a plug-in."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
COLDEST = 1e-6
"""The lowest temperature above 0: below, logits divided by it leave float32."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class ComponentConfig(BaseModel):
    """A plug-in: `type` names a built-in, whose knobs are the other keys; or `type = "custom"` with
    `import_path` and `kwargs`. Knobs are checked against the component's own signature when it is resolved."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str = "default"
    """A name from the component's table, or "custom"."""
    import_path: str | None = None
    """With "custom": `module.function`."""
    kwargs: dict[str, Any] = Field(default={}, exclude_if=lambda kwargs: not kwargs)
    """With "custom": keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.type == "custom":
            if self.import_path is None:
                raise ValueError('type = "custom" needs import_path = "module.function"')
            if self.model_extra:
                names = ", ".join(self.model_extra)
                raise ValueError(f'{names}: with type = "custom" arguments go into kwargs = {{ ... }}')
        elif self.import_path is not None or self.kwargs:
            raise ValueError(f'import_path and kwargs belong to type = "custom", found type = "{self.type}"')
        return self

    @property
    def knobs(self) -> dict[str, Any]:
        """The keyword arguments for the component."""
        return dict(self.kwargs) if self.type == "custom" else dict(self.model_extra or {})
