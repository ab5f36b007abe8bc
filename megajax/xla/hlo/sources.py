"""Read the Python frames of a program's instructions.

They are in tables at the top of the program's text or, in older texts, in each instruction's
metadata.
"""

import re

from megajax.xla.hlo.errors import HloError

MOST = 4  # most frames; what calls the step is the same for all of its instructions


class Sources:
    """The frames in the tables at the top of a program's text, as XLA numbers them.

    Raises HloError if a table lacks an entry to which a different table refers.
    """

    def __init__(self, text: str):
        head = text.split('\n\n%', 1)[0]
        self.files = {
            int(number): name
            for number, name in re.findall(
                r'^(\d+) "(.*)"$', _section(head, 'FileNames'), re.MULTILINE
            )
        }
        places = re.findall(
            r'^(\d+) \{file_name_id=(\d+).*? line=(\d+)',
            _section(head, 'FileLocations'),
            re.MULTILINE,
        )
        self.places = {int(number): (int(file), int(line)) for number, file, line in places}
        frames = re.findall(
            r'^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?',
            _section(head, 'StackFrames'),
            re.MULTILINE,
        )
        # XLA writes the number of the parent plus one: frame 3, called by 2, has parent_frame_id=3.
        self.frames = {
            int(number): (int(place), int(parent or 1) - 1) for number, place, parent in frames
        }
        self._check()

    def _check(self) -> None:
        for number, (file, _) in self.places.items():
            if file not in self.files:
                raise HloError(f'FileLocations: {number} is in file {file}, which FileNames lacks')
        for number, (place, _) in self.frames.items():
            if place not in self.places:
                raise HloError(
                    f'StackFrames: {number} is at location {place}, which FileLocations lacks'
                )

    def of(self, attributes: str) -> str:
        """Return the frames of an instruction, `file:line < file:line < ...`, from its attributes.

        The innermost comes first, and the frames beyond MOST are left out. Empty if the text does
        not record them.
        """
        if match := re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes):
            return f'{match[1]}:{match[2]}'
        match = re.search(r'\bstack_frame_id=(\d+)', attributes)
        frame = int(match[1]) if match else 0
        chain: dict[int, str] = {}
        while frame in self.frames and frame not in chain and len(chain) < MOST:
            place, parent = self.frames[frame]
            file, line = self.places[place]
            chain[frame] = f'{self.files[file]}:{line}'
            frame = parent
        return ' < '.join(chain.values())


def _section(head: str, title: str) -> str:
    _, separator, rest = head.partition(f'\n{title}\n')
    return rest.split('\n\n', 1)[0] if separator else ''
