"""The base class of results that a command returns as an object, prints or writes as JSON."""

from pydantic import BaseModel, ConfigDict


class Result(BaseModel):
    """A frozen pydantic model that rejects unknown fields.

    JSON has no infinite numbers or NaN: they are the strings "Infinity", "-Infinity" and "NaN",
    which the model reads again.
    """

    model_config = ConfigDict(frozen=True, extra='forbid', ser_json_inf_nan='strings')
