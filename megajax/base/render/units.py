"""Format numbers with units for people."""


def si(count: float) -> str:
    """Format bytes in the largest unit that gives at least 1 when rounded: 25.4 GB."""
    for unit, digits in (('B', 0), ('kB', 1), ('MB', 1), ('GB', 1)):
        if round(count, digits) < 1000:
            return f'{count:.{digits}f} {unit}'
        count /= 1000
    return f'{count:.1f} TB'


def duration(seconds: float) -> str:
    """Format a time for people: 12.3 s, 4 min 5 s, 7 h 30 min."""
    if seconds < 0.9995:  # three digits of milliseconds would round to 1000
        return f'{1e3 * seconds:.3g} ms'
    if seconds < 99.95:
        return f'{seconds:.1f} s'
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f'{minutes} min {rest} s'
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f'{hours} h {minutes} min'
    days, hours = divmod(round(seconds / 3600), 24)
    return f'{days} d {hours} h'


def count(number: int, one: str, many: str = '') -> str:
    """Return a number with its noun: 1 step, 2 steps."""
    return f'{number:,} {one if number == 1 else many or one + "s"}'


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with so many digits, or from 1,000 on as an integer: 0.0123, 412, 2,048.

    Numbers from 1e9 on, and very small ones, have an exponent.
    """
    text = f'{number:.{digits}g}'
    return f'{number:,.0f}' if 1000 <= abs(float(text)) < 1e9 else text


def large(number: float) -> str:
    """Return a large number with three digits: 4.46 M, 1.2 T."""
    if number >= 1e6:
        number = float(f'{number:.3g}')  # 999.9 M rounds to 1 B
    for size, unit in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if number >= size:
            return f'{number / size:.3g} {unit}'
    return f'{number:,.0f}'
