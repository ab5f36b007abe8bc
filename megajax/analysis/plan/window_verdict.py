"""The verdict on sliding windows: how much they save in a step."""

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Software
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.config import Config
from megajax.core.counts.products import products
from megajax.core.counts.windows import windows


def on_windows(config: Config, time: StepTime, cluster: Cluster, program: Software) -> str | None:
    """Say how much windows save in attention and in the step time; None without windows.

    The comparison assumes that a causal kernel without a window also skips masked scores.
    """
    shares = windows(config.model)
    if {*shares} == {None}:
        return None
    without = _without(config)
    flash = program.uses_flash(config, cluster.hardware.compute_capability)
    ours, theirs = (_attention_flops(each, flash=flash) / 1e12 for each in (config, without))
    ratio = step_time(without, cluster, program).total / time.total
    slower = f'{ratio - 1:.1%} longer' if ratio < 1.5 else f'{ratio:.2f}x as long'
    layers = int((1 - shares.get(None, 0)) * config.model.num_layers)
    return (
        f'in {layers} of {config.model.num_layers} layers: attention takes {ours:,.1f} TFLOP per '
        f'GPU and step, {theirs:,.1f} without windows; without them the step takes {slower}'
    )


def _without(config: Config) -> Config:
    """Return the config with the same layers, but no windows."""
    model = config.model
    layers = tuple(
        entry.model_copy(update={'window': None}) if entry.window else entry
        for entry in model.layers
    )
    whole = model.model_copy(update={'window': None, 'layers': layers})
    return config.model_copy(update={'model': whole})


def _attention_flops(config: Config, *, flash: bool) -> float:
    """Return the FLOPs of attention in a step on a GPU; a causal flash kernel skips half of them.

    Not every block is causal: blocks of other context shards and a vision encoder have no mask.
    """
    return sum(
        product.times * product.flops / (2 if product.flash and product.is_causal else 1)
        for product in products(config, flash=flash)
        if product.where == 'attention'
    )
