"""Find a small part of a module that shows the same fault."""

from collections.abc import Callable, Iterator

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program
from megajax.xla.reduce.cut import Cut, homes, whole

IsFaulty = Callable[[str], bool]
Progress = Callable[[str], None]


def reduced(text: str, is_faulty: IsFaulty, say: Progress = lambda line: None) -> str | None:
    """Return a small part of a module that is still faulty; None if no part is.

    `is_faulty` gets the text of a module, usually compiles it, and must be false for modules that
    do not compile. First, the part is a range of consecutive instructions, found by two binary
    searches; then results and instructions are removed.
    """
    search = _Search(is_faulty, say)
    program = Program(text)
    part = next((part for home in homes(program) if search(part := whole(program, home))), None)
    if part is None:
        return None
    part, size = search.window(part), None
    while size != (size := part.size):
        part = search.fewer(part, lambda part: list(part.results), _without_results)
        part = search.fewer(part, lambda part: part.removable, _without_instructions)
    return part.text()


class _Search:
    """Parts of a module that were tried."""

    def __init__(self, is_faulty: IsFaulty, say: Progress):
        self.is_faulty, self.say = is_faulty, say
        self.tried: dict[str, bool] = {}

    def __call__(self, part: Cut) -> bool:
        try:
            text = part.text()
        except HloError:
            return False
        if text not in self.tried:
            self.tried[text] = self.is_faulty(text)
            verdict = 'FAULTY' if self.tried[text] else 'not faulty'
            self.say(f'{verdict}: {len(part.kept)} instructions of {part.home.name}')
        return self.tried[text]

    def window(self, part: Cut) -> Cut:
        """Return the part between the first instruction that is needed and the last one."""
        names = part.removable

        def between(start: int, stop: int) -> Cut:
            return Cut.of(part.program, part.home, names[start:stop])

        stop = _smallest(1, len(names), lambda stop: self(between(0, stop)))
        start = -_smallest(1 - stop, 0, lambda start: self(between(-start, stop)))
        found = between(start, stop)
        return found if self(found) else part

    def fewer(
        self,
        part: Cut,
        names_of: Callable[[Cut], list[str]],
        smaller: Callable[[Cut, list[str]], Iterator[Cut]],
    ) -> Cut:
        """Remove names in chunks: halves first, single ones last."""
        chunk = max(len(names_of(part)) // 2, 1)
        while True:
            place = len(names_of(part))
            while place > 0:
                names = names_of(part)[max(place - chunk, 0) : place]
                tried = (each for each in smaller(part, names) if each.size < part.size)
                part = next(filter(self, tried), part)
                place = min(place - chunk, len(names_of(part)))
            if chunk == 1:
                return part
            chunk //= 2


def _without_results(part: Cut, names: list[str]) -> Iterator[Cut]:
    left = tuple(name for name in part.results if name not in names)
    yield part._replace(results=left).live()


def _without_instructions(part: Cut, names: list[str]) -> Iterator[Cut]:
    yield part.without(names)
    yield part.without(names, returning=True)


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest integer that holds, if all larger ones do; `high` is not tried."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
