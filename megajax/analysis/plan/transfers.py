"""Predict the seconds of a step's collectives on a cluster, and how many of them matmuls hide."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from megajax.analysis.plan.network import Cluster, Ring
from megajax.analysis.plan.programs import Software
from megajax.core.config import Config
from megajax.core.counts.collective import Expected
from megajax.core.counts.layers import stacks
from megajax.core.counts.product import DENSE, Phase

ProductKey = tuple[str, Phase]  # the name and the phase of matmuls


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTransfer:
    """The collectives of one site, phase, axis and kind, in one step.

    Of the `seconds` of transfer, `hidden` overlap matmuls.
    """

    site: str
    phase: Phase
    axis: str  # axis of the mesh; `row+model` is over both
    kind: str
    times: int
    wire_bytes: float
    crosses_hosts: bool
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        """Return the seconds that no matmul hides, for which a GPU waits."""
        return self.seconds - self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """The seconds of matmuls in a step: the total, and those that do not yet hide a transfer."""

    seconds: Mapping[ProductKey, float]
    left: dict[ProductKey, float]

    @classmethod
    def of(cls, seconds: Mapping[ProductKey, float]) -> Self:
        """Return the seconds of matmuls that hide nothing yet."""
        return cls(seconds=seconds, left=dict(seconds))

    def copy(self) -> Self:
        """Return a copy that can hide further transfers without changing this one."""
        return dataclasses.replace(self, left=dict(self.left))

    def hide(self, key: ProductKey, share: float, needed: float) -> float:
        """Hide up to `needed` seconds of transfers behind a share of matmuls; return the seconds.

        A matmul hides one transfer at a time.
        """
        covered = min(needed, share * self.seconds.get(key, 0.0), self.left.get(key, 0.0))
        self.left[key] = self.left.get(key, 0.0) - covered
        return covered


def transfers(
    collectives: Iterable[Expected],
    config: Config,
    cluster: Cluster,
    program: Software,
    products: Waiting,
) -> list[PlannedTransfer]:
    """Return the transfers of collectives, which use up the seconds of `products`.

    Collectives that overlap the same matmuls share the matmuls' seconds, in the order given. The
    hidden part of a transfer is the smaller of its time and the time of the matmuls it overlaps.
    """
    sent, rings, has_both = [], dict[str, Ring](), len(stacks(config.model)) > 2
    for collective in collectives:
        site = collective.site
        wire = collective.wire_bytes * (
            program.gradient_bytes / 4 if site.name == 'gradients' else 1
        )
        if site.axis not in rings:
            in_layout = program.at_experts(config) if site.name == 'experts' else config
            rings[site.axis] = cluster.ring(in_layout, site.axis)
        ring = rings[site.axis]
        needed = collective.times * ring.seconds(collective.kind, wire)
        share, names, phase, of_products = program.hidden_by(collective, config)
        of_products, hidden = share if of_products is None else of_products, 0.0
        for name in _in_each_stack(names, site.name) if has_both else names:
            key = name, phase or site.phase
            hidden += products.hide(key, of_products, share * needed - hidden)
        sent.append(
            PlannedTransfer(
                site=site.name,
                phase=site.phase,
                axis=site.axis,
                kind=collective.kind,
                times=collective.times,
                wire_bytes=collective.times * wire,
                crosses_hosts=ring.hosts > 1,
                seconds=needed,
                hidden=hidden,
            )
        )
    return sent


def _in_each_stack(names: Iterable[str], site: str) -> Iterator[str]:
    """Yield the names of the matmuls that hide a transfer, in a model with MLPs and experts.

    The collectives of an MLP overlap its own matmuls, not the experts' matmuls.
    """
    for name in names:
        is_of_network = name.split()[0] in ('up', 'down')
        if not is_of_network or site != 'mlp':
            yield name
        if is_of_network and site != 'experts':
            yield f'{DENSE}{name}'
