"""What an instruction takes in a step is its mean over all traced steps."""

import pytest

from megajax.analysis.profile.intervals import Idle
from megajax.analysis.profile.measure import Measured, Runs


def test_runs_are_divided_by_the_number_of_steps() -> None:
    runs = {'dot.1': Runs(seconds=[0.1, 0.2, 0.3, 0.4], shares=[0.1, 0.1, 0.2, 0.2])}
    device = Measured(process=0, device=0, num_steps=2, step=1.0, idle=Idle(0, 0, 0), runs=runs)
    assert device.launches('dot.1') == 2
    assert device.seconds('dot.1') == pytest.approx(0.5)
    assert device.share('dot.1') == pytest.approx(0.3)
    assert device.launches('another') == device.seconds('another') == 0
