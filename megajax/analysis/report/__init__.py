"""Report on runs in one HTML file that needs no network and contains no scripts.

It answers in this order: Did it learn? What did it cost? Did anything go wrong? Where did the time
go? Is it as fast as predicted? It reads only files of the runs; nothing is compiled.
"""

from megajax.analysis.report.write import check_out, write_at_end, write_report

__all__ = ['check_out', 'write_at_end', 'write_report']
