"""A Hugging Face family: functions that read and write its config.json, and its tensors' names.

Imports neither jax nor numpy.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.reader import Keys, Reader

if TYPE_CHECKING:
    import numpy as np

HEAD = 'lm_head.weight'
QUERIES, KEY, VALUE = slice(None, -2), slice(-2, -1), slice(-1, None)
GATE, UP = slice(0, 1), slice(1, 2)


class There(NamedTuple):
    """A tensor of a Hugging Face directory, and the part of a parameter that it contains."""

    name: str  # {} is replaced by the layer's index
    dims: str
    columns: slice = slice(None)  # range of C, the columns of a head group, or of U, gate and up
    is_square: bool = False  # whether the last dim is two equal dims in the file
    in_pairs: bool = False  # whether rotary pairs are adjacent in the file, not in two halves of H


# Returns the tensors of a directory, which the second argument names, with packed tensors unpacked.
Unpack = Callable[[Mapping[str, 'np.ndarray'], str], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family, as `megajax import hf` and `megajax export hf` know it."""

    name: str  # model_type in config.json
    architecture: str  # class in transformers
    read_config: Callable[[Reader], Keys]  # from config.json to the keys of `model`
    write_config: Callable[[ModelConfig], Keys]  # the reverse; the result is read back as a check
    tensors: Mapping[str, list[There]]  # for each parameter's path
    # Tensors that contain several of `tensors`, one below the other, by name.
    joined: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # With tied embeddings: copies that a directory may contain, and the end of the original's name.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Buffers that older versions of transformers saved and that are not read.
    buffers: re.Pattern[str] | None = None
    # How tensors are unpacked, by the quant_method of quantization_config.
    packings: Mapping[str, Unpack] = dataclasses.field(default_factory=dict)
    # Whether a directory may contain further layers, for multi-token prediction, which are not
    # read.
    has_more_layers: bool = False
    sees: bool = False  # whether its models have a vision encoder
    prefix: str = ''  # prefix of all tensor names except the head's, if some directories omit it
