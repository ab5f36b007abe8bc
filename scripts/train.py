"""Train a config in one process or many: python scripts/train.py CONFIG [KEY=VALUE ...]"""

import sys

import megajax

if __name__ == '__main__':
    source, *overrides = sys.argv[1:] or ['tiny']
    try:
        run = megajax.train(megajax.load(source, overrides))
    except megajax.RunError as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(error.exit_code)
    print(run.checkpoint, run.metrics[-1])
