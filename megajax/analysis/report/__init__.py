"""A report on runs: one HTML file that needs no network and holds no script.

It answers, in this order: did it learn, what did it cost, was anything wrong, where did time go, is
it as fast as predicted. It reads what the runs have written; nothing is compiled.
"""

from megajax.analysis.report.write import check_out, write_at_end, write_report

__all__ = ['check_out', 'write_at_end', 'write_report']
