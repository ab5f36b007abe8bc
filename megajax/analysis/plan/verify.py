"""Compare the memory of a plan with the memory that XLA plans, without a GPU."""

from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.result import Plan
from megajax.core.config import Config, ConfigError
from megajax.core.config.rules import incompatibilities
from megajax.core.hardware.targets import GPUS, check_target


def check_verify(gpu: str) -> None:
    """Raise ConfigError unless the step can be compiled for the GPU on this machine."""
    if gpu not in GPUS:
        raise ConfigError(f'verify with gpu {gpu}: the step can be compiled for {", ".join(GPUS)}')
    check_target(gpu)


def verified(plan: Plan, gpu: str) -> Plan:
    """Return the plan with the bytes that XLA plans for its layout and for the fastest one.

    If they are the same layout, it is compiled once. Raises ConfigError before compiling if
    megajax's step does not support one of them, which another program's may.
    """
    is_best = plan.config == plan.best_config
    planned, fastest = plan.planned(), plan.fastest()
    if problems := incompatibilities(planned) or incompatibilities(fastest):
        raise ConfigError(
            *problems,
            "--verify compiles megajax's step, which does not support this config: leave out "
            f'--verify to plan it for --program {plan.program}',
        )
    compiled = _compiled_bytes(planned, gpu, plan)
    best = compiled if is_best else _compiled_bytes(fastest, gpu, plan)
    return plan.model_copy(update={'compiled_bytes': compiled, 'best_compiled_bytes': best})


def _compiled_bytes(config: Config, gpu: str, plan: Plan) -> int:
    step = compile_in_child(config, gpu, plan.gpus // plan.gpus_per_host)
    # XLA's figure does not include the copies of a replayed step.
    return step.arguments + step.temporaries + step.outputs + memory(config).repetition
