"""Numbers with their units, as a page says them."""


def count(number: int, one: str, many: str = '') -> str:
    """Return a number with its noun: 1 step, 2 steps."""
    return f'{number:,} {one if number == 1 else many or one + "s"}'


def large(number: float) -> str:
    """Return a large number with three digits: 4.46 M, 1.2 T."""
    for size, unit in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if number >= size:
            return f'{number / size:.3g} {unit}'
    return f'{number:,.0f}'
