"""A compiled training step as a record: its text, its memory plan and its shardings."""

import dataclasses
import json
from typing import Any, Self

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from megajax.core.parallel.placements import Placement, placements
from megajax.core.train.step import TrainState
from megajax.xla.hlo.buffers import Buffer
from megajax.xla.hlo.text import program_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled step: its text, its memory plan and the shardings of its state.

    The plan has `arguments`, `temporaries` and `outputs`, in bytes per device.
    """

    text: str  # compiled HLO
    mesh: dict[str, int]  # size of each mesh axis
    devices_per_host: int
    arguments: int
    temporaries: int
    outputs: int  # bytes of outputs, without outputs that reuse the memory of arguments
    parameters: list[Placement]
    optimizer: list[Placement]
    jax_version: str
    seconds: float  # compile time
    buffers: tuple[Buffer, ...] = ()  # buffers of the temporaries at their peak, if requested

    def without_text(self) -> Self:
        """Return the record without its text, which is by far its largest part."""
        return dataclasses.replace(self, text='')

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, record: str, **others: Any) -> Self:
        """Return the record that `to_json` wrote, with `others` in place of its fields."""
        fields = json.loads(record) | others
        for name in ('parameters', 'optimizer'):
            fields[name] = [_placement(**placement) for placement in fields[name]]
        fields['buffers'] = tuple(
            Buffer(tuple((name, index) for name, index in names), *others)
            for names, *others in fields['buffers']
        )
        return cls(**fields)


def record_step(
    compiled: Compiled,
    state: TrainState,
    mesh: Mesh,
    *,
    devices_per_host: int,
    seconds: float,
    buffers: tuple[Buffer, ...] = (),
) -> CompiledStep:
    """Return the record of a step that took `seconds` to compile.

    `state` is the state that the step takes, allocated or abstract.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    return CompiledStep(
        text=program_text(compiled),
        mesh=dict(mesh.shape),
        devices_per_host=devices_per_host,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        parameters=placements(state.params),
        optimizer=placements(state.opt_state),
        jax_version=jax.__version__,
        seconds=seconds,
        buffers=buffers,
    )


def _placement(*, shape: list[int], spec: list[Any], **others: Any) -> Placement:
    return Placement(
        shape=tuple(shape),
        spec=tuple(tuple(axis) if isinstance(axis, list) else axis for axis in spec),
        **others,
    )
