"""Turns what ranks write into lines for a terminal, a pipe or a file.

Progress bars write one line over and over (carriage returns), and move between lines (escape
sequences): each rank has a small screen, on which that stays harmless. Colours pass; nothing else
that a rank writes acts on the terminal. Which logs are read is the task of `logs`.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relaunch.cli import terminal
from relaunch.config import ConfigError
from relaunch.fields import Pattern
from relaunch.spec.job import OutputStream
from relaunch.text import CONTROLS

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
BAR_INTERVAL_S = 5.0
"""Seconds between two lines of the same bar in a pipe or a file, and until an unfinished line is
printed."""
MAX_ROWS = 16
"""Rows of a rank to which its cursor may return: more than anyone nests bars."""
MAX_LINE = 1_000_000
"""Characters after which a line without an end is cut."""
MAX_SEQUENCE = 4096
"""Characters after which an escape sequence without an end is no longer waited for."""
LIVE_ROWS = 8
"""Most rows of unfinished lines that are shown at once on a terminal."""

_TOKEN = re.compile(
    r"""(?P<newline>\n)|(?P<home>\r)|(?P<back>\x08)
    | \x1b\[ (?P<numbers>[0-?]*) [ -/]* (?P<control>[@-~])   # CSI: colours, cursor, erasing
    | \x1b [\]PX^_] [^\x07\x1b]{0,4096} (?:\x07|\x1b\\)     # OSC and its kin: titles, links
    | \x1b [ -/]* [0-OQ-WYZ\\`-~]                            # other escapes
    """
    rf"| [{CONTROLS}]",  # other control characters, those that turn or hide text among them
    re.VERBOSE,
)
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
_SPECIAL = re.compile(f"[{CONTROLS}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_CONCEAL = 8
"""The attribute of text that is not seen, of the numbers of a colour sequence."""
_NUMBERS_AFTER = {2: 3, 5: 1}
"""Numbers after the mode of 38, 48 and 58: red, green and blue, or an index."""
_MAX_PEN = 1024
"""Characters of colour sequences between two texts, after which further ones are left out."""


@dataclass
class Row:
    text: str = ""
    is_bar: bool = False
    """Whether it was written over: then only its newest state counts."""
    printed: str | None = None
    """What was printed of it last."""
    since: float | None = None
    """When it began to differ from that."""

    @property
    def shown(self) -> str:
        return self.text.rstrip() if self.is_bar else self.text

    @property
    def is_unprinted(self) -> bool:
        """Whether it has text that was not printed."""
        return self.shown != (self.printed or "") and bool(_COLOUR.sub("", self.text).strip())


class RankScreen:
    """The last rows of one rank's output, and where its cursor is."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour
        self._rows = [Row()]
        self._at = 0
        self._is_home = False
        """Whether the cursor is at the begin of a row: text replaces what is there."""
        self._pen = ""
        """Colours that were set since the last text."""
        self._rest = ""

    @property
    def unprinted(self) -> list[Row]:
        """The rows whose newest state was not printed."""
        return [row for row in self._rows if row.is_unprinted]

    def feed(self, data: str, now: float) -> list[str]:
        """Take output of the rank; return the lines that it finishes."""
        data, self._rest = self._rest + data, ""
        if (cut := _INCOMPLETE.search(data, max(0, len(data) - MAX_SEQUENCE))) is not None:
            data, self._rest = data[: cut.start()], data[cut.start() :]
        lines: list[str] = []
        if self._at == len(self._rows) - 1 and not self._is_home and not _SPECIAL.search(data):
            self._write_plain(data, now, lines)
            return lines
        done = 0
        for token in _TOKEN.finditer(data):
            self._write(data[done : token.start()], now, lines)
            done = token.end()
            if token["newline"]:
                self._end_row(lines)
            elif token["home"]:
                self._is_home = True
            elif token["back"]:
                self._erase_last(now)
            elif token["control"]:
                self._control(token[0], token["control"], token["numbers"])
        self._write(data[done:], now, lines)
        return lines

    def _write_plain(self, data: str, now: float, lines: list[str]) -> None:
        """Take data without control characters: most of what ranks print, and much of it."""
        first, *others = data.split("\n")
        self._write(first, now, lines)
        if not others:
            return
        self._end_row(lines)
        *whole, last = others
        lines += whole
        self._rows = [
            *self._rows[:-1],
            *(Row(line, printed=line) for line in whole[-MAX_ROWS:]),
            Row(),
        ][-MAX_ROWS:]
        self._at = len(self._rows) - 1
        self._write(last, now, lines)

    def _write(self, text: str, now: float, lines: list[str]) -> None:
        if not text:
            return
        row = self._rows[self._at]
        if self._is_home:
            self._clear(row)
            self._is_home = False
        row.text += self._pen + text
        self._pen = ""
        if row.since is None:
            row.since = now
        if len(row.text) > MAX_LINE:
            self._end_row(lines)

    def _clear(self, row: Row) -> None:
        row.is_bar = row.is_bar or bool(row.text)
        row.text = ""

    def _end_row(self, lines: list[str]) -> None:
        row = self._rows[self._at]
        if self._pen and not self._is_home:
            row.text += self._pen
        self._pen = ""
        if self._at < len(self._rows) - 1:
            self._at += 1
            self._is_home = True
            return
        for each in self._rows:
            # An empty line is a line, but an erased bar is not.
            if each.is_unprinted or (each.printed is None and not each.is_bar):
                lines.append(each.shown)
                each.printed, each.since = each.shown, None
        self._rows = [*self._rows, Row()][-MAX_ROWS:]
        self._at = len(self._rows) - 1
        self._is_home = False

    def _erase_last(self, now: float) -> None:
        row = self._rows[self._at]
        if not self._is_home and row.text and not row.text.endswith("m"):
            row.text = row.text[:-1]
            row.is_bar = True

    def _control(self, sequence: str, control: str, numbers: str) -> None:
        row = self._rows[self._at]
        count = int(numbers) if numbers.isascii() and numbers.isdigit() and len(numbers) < 5 else 1
        match control:
            case "m" if self._colour and len(self._pen) < _MAX_PEN:
                self._pen += _keep_colours(sequence)
            case "A" | "F":
                self._at = max(0, self._at - count)
                self._is_home = self._is_home or control == "F"
            case "B" | "E":
                self._at = min(len(self._rows) - 1, self._at + count)
                self._is_home = self._is_home or control == "E"
            case "G" if count == 1:
                self._is_home = True
            case "K" if numbers in ("1", "2") or self._is_home:
                self._clear(row)
            case "J" if numbers in ("", "0") and self._is_home:
                for each in self._rows[self._at :]:
                    self._clear(each)
            case _:
                pass  # moves or erases what is not ours: other rows of the terminal


def _keep_colours(sequence: str) -> str:
    """Return a colour sequence without what hides text; empty if it is another sequence.

    Some that end like one set how the keyboard answers (`CSI > m`), or ask for it (`CSI ? m`).
    """
    if not _COLOUR.fullmatch(sequence):
        return ""
    if str(_CONCEAL) not in sequence:
        return sequence
    numbers, kept = iter(sequence[2:-1].split(";")), []
    for number in numbers:
        if number in ("38", "48", "58"):
            mode = next(numbers, "")
            count = _NUMBERS_AFTER.get(int(mode), 0) if mode.isdigit() else 0
            kept += [number, mode, *itertools.islice(numbers, count)]
        elif number.partition(":")[0].lstrip("0") != str(_CONCEAL):
            kept.append(number)
    return f"\x1b[{';'.join(kept)}m" if kept else ""


@dataclass
class Printer:
    """Prints the output of all ranks line by line, each with its rank.

    On a terminal, unfinished lines are shown below the others, and drawn again as they change.
    Elsewhere they are printed when they have not changed their begin for some seconds, and bars at
    most once in that time.
    """

    world_size: int
    colour: bool = field(default_factory=sys.stdout.isatty)
    is_live: bool = field(default_factory=terminal.can_redraw)
    interval: float = BAR_INTERVAL_S
    """Seconds; infinite to print only final states."""
    grep: Pattern | None = None
    is_stderr: bool = False
    """Whether this is what ranks wrote to a stderr of their own."""
    to_stderr: bool = False
    """Whether it is printed to our stderr as well, and not marked in our stdout."""
    shows: Callable[[int], bool] = lambda rank: True
    """Whether the output of a rank is printed."""
    copy: Callable[[int, str], None] | None = None
    """Gets the output of every rank as it is."""
    clock: Callable[[], float] = time.monotonic
    _screens: dict[int, RankScreen] = field(default_factory=dict)
    _drawn: int = 0
    """Rows on the terminal below the lines that stay."""

    def feed(self, rank: int, data: str) -> None:
        if self.copy is not None:
            self.copy(rank, data)
        if not self.shows(rank):
            return
        screen = self._screens.setdefault(rank, RankScreen(self.colour))
        self._print(rank, screen.feed(data, self.clock()))

    def refresh(self) -> None:
        """Show unfinished lines, where they are due."""
        if self.is_live:
            self._draw()
            return
        due = self.clock() - self.interval
        for rank, screen in sorted(self._screens.items()):
            rows = [row for row in screen.unprinted if row.since is None or row.since <= due]
            self._print_unfinished(rank, rows)

    @property
    def next_refresh(self) -> float:
        """Seconds until an unfinished line is due; infinite: there is none."""
        rows = (row for screen in self._screens.values() for row in screen.unprinted)
        first = min((row.since for row in rows if row.since is not None), default=None)
        if first is None or self.is_live:
            return float("inf")
        return max(0.0, first + self.interval - self.clock())

    def flush(self) -> None:
        """Print what has no end; nothing more of these ranks comes."""
        for rank, screen in sorted(self._screens.items()):
            self._print_unfinished(rank, screen.unprinted)
        self._screens.clear()
        self.erase()
        if self.is_live:
            terminal.set_eraser(None)

    def erase(self) -> None:
        """Erase the unfinished lines from the terminal, before something else is printed there."""
        if self._drawn:
            self._write(f"\r\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        # Past the guard: this draws, and what ranks wrote is on their screens.
        out = terminal.get_bare_stream(sys.stderr if self.to_stderr else sys.stdout)
        out.write(text)
        out.flush()

    def _print_unfinished(self, rank: int, rows: list[Row]) -> None:
        self._print(rank, [row.shown for row in rows])
        for row in rows:
            row.printed, row.since = row.shown, None

    def _print(self, rank: int, lines: list[str]) -> None:
        lines = [line for line in lines if self._is_wanted(line)]
        if not lines:
            return
        self.erase()
        terminal.erase_drawn()  # the other stream's
        prefix = self._prefix(rank)
        self._write("".join(f"{prefix} {self._end_colour(line)}\n" for line in lines))

    def _is_wanted(self, line: str) -> bool:
        return self.grep is None or bool(self.grep.search(_COLOUR.sub("", line)))

    @staticmethod
    def _end_colour(line: str) -> str:
        return f"{line}\x1b[0m" if "\x1b" in line else line

    def _prefix(self, rank: int) -> str:
        # Launchers are numbered after the ranks, in the order of their nodes.
        name = (
            f"[rank {rank}]" if rank < self.world_size else f"[launcher {rank - self.world_size}]"
        )
        prefix = name.ljust(len(f"[rank {self.world_size - 1}]"))
        if self.is_stderr and not self.to_stderr:
            prefix += " stderr:"
        return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m" if self.colour else prefix

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        rows = [
            (rank, row.shown)
            for rank, screen in sorted(self._screens.items())
            for row in screen.unprinted
            if self._is_wanted(row.shown)
        ]
        room = max(1, min(LIVE_ROWS, size.lines // 2))
        shown = rows if len(rows) <= room else rows[: room - 1]
        lines = []
        for rank, text in shown:
            prefix = self._prefix(rank)
            width = size.columns - 2 - len(_COLOUR.sub("", prefix))
            lines.append(f"{prefix} {self._end_colour(_fit(text, width))}")
        if len(shown) < len(rows):
            lines.append(
                f"… and {len(rows) - len(shown)} more unfinished lines"[: size.columns - 1]
            )
        if not lines and not self._drawn:
            return
        terminal.set_eraser(self.erase)
        up = f"\r\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
        self._write(up + "".join(f"{line}\n" for line in lines))
        self._drawn = len(lines)


@dataclass(frozen=True)
class RunOutput:
    """What `run` does with the output of ranks, as torchrun's options say."""

    hidden: frozenset[OutputStream] = frozenset()
    """Streams that are not printed."""
    local_ranks: frozenset[int] | None = None
    """Only the output of these ranks of each node is printed; None: of all."""
    folder: Path | None = None
    """Where a copy of the output is written: GENERATION - 1/RANK/STREAM.log below it."""

    def check_folder(self) -> None:
        """Create the folder of the copies.

        Raises:
            ConfigError: It cannot be created.
        """
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir: {self.folder}: {error.strerror}") from None

    def make_printer(
        self,
        world_size: int,
        ranks_per_node: int,
        generation: int,
        streams: tuple[OutputStream, ...],
        stream: OutputStream,
    ) -> Printer:
        """Return what prints, and copies, one stream of one generation.

        Args:
            world_size: The number of ranks.
            ranks_per_node: The number of ranks on each node.
            generation: The number of the generation.
            streams: All streams that are printed at the same time.
            stream: The one that is printed.
        """
        copies = None
        if self.folder is not None:
            copies = _Copies(self.folder / f"attempt_{generation - 1}", stream)
        printer = Printer(
            world_size,
            is_stderr=stream == "stderr",
            to_stderr=stream == "stderr",
            shows=lambda rank: (
                stream not in self.hidden
                and (
                    self.local_ranks is None
                    or rank >= world_size
                    or rank % ranks_per_node in self.local_ranks
                )
            ),
            copy=None if copies is None else copies.write,
        )
        if stream == "stderr":
            printer.colour = sys.stderr.isatty()
            printer.is_live = printer.is_live and printer.colour
        elif len(streams) > 1:
            printer.is_live = False  # one of two draws lines again: bars are on stderr
        return printer


class _Copies:
    """Writes one stream of the ranks of a generation into files."""

    def __init__(self, folder: Path, stream: OutputStream) -> None:
        self._folder = folder
        self._stream = stream
        self._begun: set[int] = set()
        self._has_failed = False

    def write(self, rank: int, data: str) -> None:
        path = self._folder / str(rank) / f"{self._stream}.log"
        try:
            if rank not in self._begun:
                path.parent.mkdir(parents=True, exist_ok=True)
            # What another run of this name has left there is replaced.
            with path.open("a" if rank in self._begun else "w", newline="") as file:
                file.write(data)
            self._begun.add(rank)
        except OSError as error:  # training is worth more than a copy of its output
            if not self._has_failed:
                terminal.say(f"{path} cannot be written and has gaps: {error.strerror}")
            self._has_failed = True


def _fit(text: str, width: int) -> str:
    """Return a text cut to a width in columns; a text that is cut loses its colours."""
    plain = _COLOUR.sub("", text).expandtabs()
    columns = 0
    for at, letter in enumerate(plain):
        columns += (
            0
            if unicodedata.combining(letter)
            else 2
            if unicodedata.east_asian_width(letter) in "WF"
            else 1
        )
        if columns > width:
            return plain[:at]
    return text.expandtabs() if "\t" in text else text
