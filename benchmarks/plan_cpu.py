"""Measure the CPU seconds in which `megajax.plan` searches the layouts on 64 GPUs:
`python benchmarks/plan_cpu.py > OUT.md`.

Each round is a new process. The calls of Python functions are counted once, because seconds differ
between machines, and with the load of a machine.
"""

import os
import statistics
import subprocess
import sys

ROUNDS = 5
TIMED = """
import time
start = time.process_time()
import megajax
config = megajax.load('llama3_8b')
import megajax.analysis.plan.planning
imported = time.process_time()
found = megajax.plan(config, gpu='h100', gpus=64)
print(imported - start, time.process_time() - imported, len(found.layouts))
"""
COUNTED = """
import sys, megajax
config, calls = megajax.load('llama3_8b'), 0
def count(frame, event, argument):
    global calls
    calls += event == 'call'
sys.setprofile(count)
megajax.plan(config, gpu='h100', gpus=64)
sys.setprofile(None)
print(calls)
"""


def output(code: str) -> list[float]:
    text = subprocess.check_output([sys.executable, '-c', code], text=True)
    return [float(word) for word in text.split()]


if __name__ == '__main__':
    print('| load average | import s | plan s | total s |', '|---|---|---|---|', sep='\n')
    totals = []
    for _ in range(ROUNDS):
        imported, planned, layouts = output(TIMED)
        totals.append(imported + planned)
        load = os.getloadavg()[0]
        print(f'| {load:.1f} | {imported:.2f} | {planned:.2f} | {totals[-1]:.2f} |')
    (calls,) = output(COUNTED)
    print(
        f'\n{layouts:,.0f} layouts of llama3_8b on 64 H100s: {statistics.median(totals):.2f} CPU '
        f'seconds (median; {min(totals):.2f} to {max(totals):.2f}), {calls / 1e6:.2f} million calls'
    )
