"""The compiler's last module is the same whether or not its kernels become machine code."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.hardware.targets import gpu_devices, has_compiler
from megajax.xla.emulate.bisect import dump_options, modules
from megajax.xla.emulate.execute import compile_for_gpu, optimized_for_gpu
from megajax.xla.emulate.last_module import dumped, readable

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")


def traced_mlp(devices):
    mesh = jax.sharding.Mesh(np.array(devices), 'x', axis_types=(jax.sharding.AxisType.Explicit,))

    def array(*shape, spec):
        on = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on)

    arguments = (
        array(64, 128, spec=('x', None)),
        array(4, spec=(None,)),  # not used
        array(128, 128, spec=(None, None)),
    )
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(lambda x, unused, w: jnp.square(jax.nn.gelu(x @ w)).sum(), 2))
        return grad.trace(*arguments), arguments


def lines(text):
    """Return a module's lines, without the numbers of stack frames and the order of attributes."""
    body = re.sub(r' ?stack_frame_id=\d+', '', text[text.index('\n%') :])
    return sorted(sorted(re.split('[{},]', line)) for line in body.splitlines())


def test_the_last_module_is_that_of_a_whole_compilation_and_there_is_no_machine_code(tmp_path):
    devices = gpu_devices('h100', hosts=1, per_host=2)
    traced, arguments = traced_mlp(devices)
    options = {'xla_dump_to': str(tmp_path)}
    quick = optimized_for_gpu(traced, arguments, devices, options)
    assert not [*tmp_path.glob('*thunk_sequence*')]
    whole = compile_for_gpu(traced, devices, options)
    assert [*tmp_path.glob('*thunk_sequence*')]
    assert lines(quick.text) == lines(whole.text)
    assert quick.kept == whole.kept == (0, 2)
    assert quick.output_shapes == whole.output_shapes
    for one, other in zip(quick.inputs + quick.outputs, whole.inputs + whole.outputs, strict=True):
        assert one.spec == other.spec


def test_an_error_before_the_last_module_is_raised():
    devices = gpu_devices('h100', hosts=1, per_host=2)
    traced, arguments = traced_mlp(devices)
    with pytest.raises(jax.errors.JaxRuntimeError, match='xla_gpu_no_such_option'):
        optimized_for_gpu(traced, arguments, devices, {'xla_gpu_no_such_option': True})


def test_the_pass_dumps_for_a_bisection_end_with_the_last_module(tmp_path):
    devices = gpu_devices('h100', hosts=1, per_host=2)
    traced, arguments = traced_mlp(devices)
    text = optimized_for_gpu(traced, arguments, devices, dump_options(tmp_path)).text
    dumps = modules(tmp_path)
    assert len(dumps) > 10
    assert lines(dumped(dumps[-1])) == lines(text)


SCHEDULED = """HloModule step, is_scheduled=true

ENTRY %main (p: (f32[8], f32[8])) -> f32[8] {
  %p = (f32[8]{0}, f32[8]{0}) parameter(0)
  %first = f32[8]{0} negate(%p#0)
  ROOT %last = f32[8]{0} add(%first, %p#1), control-predecessors={%first, %get-tuple-element.1.0}
}
"""


def test_control_predecessors_without_a_line_of_their_own_are_left_out():
    text = readable(SCHEDULED)
    assert text == SCHEDULED.replace(', %get-tuple-element.1.0}', '}')
    assert readable(SCHEDULED.replace('%first, %get', '%get')).count('predecessors') == 0
