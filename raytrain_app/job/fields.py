"""What the sections of the job file are made of: their base, and the kinds of numbers in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions ("3" is not 3, true is not 1), no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants")


def default_name(name: str) -> BeforeValidator:
    """So that `--set optimizer.lr=0.1` needs no `name` where the file has no such section."""
    return BeforeValidator(lambda raw: {"name": name, **raw} if isinstance(raw, dict) else raw)


def _whole_above_one(amount: float) -> float:
    if amount > 1 and amount != int(amount):
        raise PydanticCustomError("amount", "a whole number when above 1, as Ray demands")
    return amount


Amount = Annotated[float, Field(ge=0), AfterValidator(_whole_above_one)]
"""Of a resource, as Ray counts it."""
