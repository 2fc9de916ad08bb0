"""What all sections have in common, and the kinds of numbers in them."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(pydantic.BaseModel):
    """A frozen group of settings that knows all its keys. Numbers are finite."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
