"""Numbers with their units, as people read them."""


def si(count: float) -> str:
    """Format bytes in the largest unit that leaves a digit before the point: 25.4 GB."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if count < 1000:
            return f'{count:.0f} B' if unit == 'B' else f'{count:.1f} {unit}'
        count /= 1000
    return f'{count:.1f} TB'
