"""A plan's memory beside the compiler's, for GPUs that need not be there."""

from megajax.config import Config, ConfigError
from megajax.hardware.targets import GPUS, check_target
from megajax.plan.result import Plan


def check_verify(gpu: str) -> None:
    """Raise ConfigError unless the step can be compiled for it here."""
    if gpu not in GPUS:
        raise ConfigError(f'verify with gpu {gpu}: the step can be compiled for {", ".join(GPUS)}')
    check_target(gpu)


def verified(plan: Plan, gpu: str) -> Plan:
    """The plan with what the compiler needs for its layout and, where that is another, for the fastest."""
    compiled = _compiled_bytes(plan.planned(), gpu, plan)
    is_best = plan.config == plan.best_config
    best = compiled if is_best else _compiled_bytes(plan.fastest(), gpu, plan)
    return plan.model_copy(update={'compiled_bytes': compiled, 'best_compiled_bytes': best})


def _compiled_bytes(config: Config, gpu: str, plan: Plan) -> int:
    from megajax.inspect.compile import compile_in_child  # here, because it imports jax

    step = compile_in_child(config, gpu, plan.gpus // plan.gpus_per_host)
    return step.arguments + step.temporaries + step.outputs
