"""The base of what a command returns as an object, prints as a table and writes as JSON."""

from pydantic import BaseModel, ConfigDict


class Result(BaseModel):
    """A frozen model without other fields."""

    model_config = ConfigDict(frozen=True, extra='forbid')
