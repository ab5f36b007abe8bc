"""Print published throughputs and the predictions of `megajax plan` as Markdown."""

from megajax.analysis.plan.published.comparison import markdown, summary_rows
from megajax.analysis.plan.published.tables import TABLES

HEAD = """# Published throughputs, and what `megajax plan` predicts for them

`python benchmarks/plan_tables.py` writes this file, and `megajax plan --table NAME` shows \
a table. TFLOP/s
are those of one GPU, as the source counts them. At most three efficiencies of a GPU are fitted
(`benchmarks/fit_gpus.py`), on the rows marked so; which rows are held out follows from a hash \
of their
text (`benchmarks/held_out.py`). The last columns are the predicted shares of the step.

| table | GPU | rows | held out: mean error | max error | fitted: mean error | max error |
|---|---|---|---|---|---|---|"""

if __name__ == '__main__':
    print(HEAD)
    for cells in summary_rows():
        print('| ' + ' | '.join(cells) + ' |')
    for table in TABLES:
        print(f'\n## {table}\n\n{markdown(table)}')
