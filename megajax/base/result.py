"""The base class of results that a command returns as an object, prints or writes as JSON."""

from pydantic import BaseModel, ConfigDict


class Result(BaseModel):
    """A frozen pydantic model that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra='forbid')
