"""The papers' tables beside what `megajax plan` predicts, as Markdown on standard output."""

from megajax.config.hardware import Efficiency
from megajax.plan.predictions import TABLES, Prediction, fit, predict
from megajax.plan.tables import markdown

HEAD = """# What `megajax plan` predicts of the papers' tables

`python benchmarks/plan_tables.py` writes this file, and `megajax plan --table NAME` shows a table. TFLOP/s are those of one GPU, by the
formula of Narayanan et al. (2021). One `matmul` and one `half_size` per type of GPU are fitted on the rows marked so, and on nothing else
(`megajax/plan/predictions.py`); the other rows are held out. The last columns are the predicted shares of the step."""
LIMITS = """Rows alternate; in the first table each model is once in either half. The errors the other way round stand above. What is
counted, and how, was written with all rows in view; only the two efficiencies are fitted. The rows of Narayanan et al. differ by 5 %, so
that a constant predicts them nearly as well: their test is weak. Those of Shoeybi et al. differ by 35 %. Strong scaling is missed: the
model knows no cost of a step but FLOPs, bytes and latencies of collectives."""


def held_out(found: list[Prediction], *, fitted: bool) -> str:
    """Mean and largest error of the rows that are not in the half."""
    errors = [abs(one.error) for one in found if one.row.fitted != fitted]
    return f'mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}'


def constant(table: str, *, fitted: bool) -> str:
    """The same of the mean of the half."""
    rows = [one.row for one in predict(table)]
    half = [row.published for row in rows if row.fitted == fitted]
    errors = [abs(sum(half) / len(half) / row.published - 1) for row in rows if row.fitted != fitted]
    return f'mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}'


def described(efficiency: Efficiency) -> str:
    return f'matmul {efficiency.matmul:g}, half_size {efficiency.half_size:g}'


if __name__ == '__main__':
    print(HEAD)
    for table in TABLES:
        print(f'\n## {table}\n\n{markdown(table)}')
        for fitted in (True, False) if table in ('scaling', 'narayanan') else ():
            found = fit(table, on_fitted=fitted)
            half = 'rows marked as fitted' if fitted else 'other rows'
            print(f'\nFitted on the {half}: {described(found)}; the rest has {held_out(predict(table, found), fitted=fitted)}.')
            print(f'Their mean, as a constant, would have {constant(table, fitted=fitted)}.')
    print(f'\n## Limits\n\n{LIMITS}')
