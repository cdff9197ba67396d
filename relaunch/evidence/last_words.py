"""Find what a process wrote about its own end: the traceback that ended it, or its last lines.

It reads the tail of a log, into which other threads and child processes write as well. It names no
cause: `rank_log` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from relaunch.evidence import exits
from relaunch.evidence.exits import strip_rank
from relaunch.text import count_noun

MAX_TEXT = 4000
"""Characters of the text that is kept: it is shown whole, and carried in the state of a job."""
MAX_ERROR = 300
"""Characters of the one line that names the error."""
INNERMOST = 6
"""Frames that are kept, and the outermost one."""
FRAME_LINES = 4
"""Lines of one frame: its file, its source, the markers below it, and how often it is repeated."""
MESSAGE_LINES, MAX_MESSAGE = 12, 1500
"""Lines and characters of an exception's message."""
LAST_LINES = 6
"""Lines that are kept of a program that left no traceback."""
NATIVE_LINES = 40
"""Lines before the end among which an abort in native code is looked for."""
MAX_LINE = 300
LONGEST = exits.MAX_LINE
"""Characters of a line that are read at all: patterns may take time by the square of its length."""

AFTER_EXIT_1, AFTER_OTHER, AFTER_SIGNAL = 60, 12, 0
"""Unknown lines that may follow the traceback that ended a process.

Python exits with 1 after an uncaught exception, whose message may have many lines, and other
threads and exit handlers go on to print. A process that a signal ended did not end by an exception,
so a traceback before other lines was handled. Abort is different: an exception may lead to it.
"""
SIGABRT = 6

QUOTES = ('"""', "'''")
"""Python's pools of processes write these around the traceback of a worker."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HEADER = re.compile(
    r"(?P<prefix>.*?)(?P<title>(?:Original |Exception Group )?"
    r"Traceback \(most recent call last\):)\s*$"
)
_BOX = re.compile(r"^\s*╭─+ Traceback \(most recent call last\)")
_BOX_FRAME = re.compile(r"^\s*│ (?P<file>\S.*?):(?P<line>\d+) in (?P<name>\S+)")
_BOX_SOURCE = re.compile(r"^\s*│ ❱\s*\d+\s(?P<source>.*?)\s*│?$")
_FRAME = re.compile(r'^\s*File ".*", line \d+(?:, in .*)?$')
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::(?:\s.*)?)?$")
_TYPICAL = re.compile(
    r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Timeout|Warning|Fail(?:ed|ure)|Group"
    r"|Abort|Empty|Full)\b"
)
_LEVEL = re.compile(r"^(?:DEBUG|INFO|NOTE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_MARGIN = re.compile(r"^\s*[|+](?P<rule>-*\+?-{5,}.*)?\s?")
_CHAIN = re.compile(
    r"^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$"
)
CHAIN_MARKS = ("another exception occurred", "the direct cause of", "Original Traceback")
_CHILD = re.compile(r"^-- Process \d+ terminated with the following error:$")
_IGNORED = re.compile(r"Exception ignored |^Error in sys\.excepthook|^Error in atexit")
_OTHER_THREAD = re.compile(r"Exception in thread |^Process \S+:$")
_NOISE = re.compile(
    r"^wandb:|^\S+:\d+: \w*Warning: |resource_tracker: There appear to be"
    r"|semaphore_tracker: There appear to be|^\s*warnings\.warn\("
    r"|^\[[WI]\d{3,4} |process group has NOT been destroyed"
    r"|destroy_process_group\(\) was not called"
    r"|^[WE]\d{4} .*torch/distributed/elastic/|^(?:WARNING|ERROR):torch\.distributed\.elastic"
    r"|^\d{0,9}:?\s{0,9}\d{1,9}%\||\d{1,9}%\|.{0,300}?\||^srun: |^slurmstepd: "
    r"|^\[rank: \d+\] Child process with PID"
    r"|^(?:\S+: line \d+: +\d+ )?(?:Aborted|Killed|Segmentation fault|Terminated)\b"
    r"|^-{10,}$|^For simplicity, JAX has removed its internal frames"
)
"""What libraries print while a process ends."""
_ABORT = re.compile(r"^terminate called |^Fatal Python error: |^fatal runtime error: ")
_JAX_EXIT = re.compile(
    r"^[EF]\d{4} .*\b(?:coordination_service\w*\.cc:\d+\]"
    r"|client\.h:\d+\] Terminating process because the JAX distributed service)"
)
"""What JAX prints while a process waits for the others at its exit, also after an exception."""
_NATIVE = re.compile(
    rf"{_ABORT.pattern}|^thread '.*' panicked at |Assertion [`'].*[`'] failed|\*\*\* stack smashing"
    r"|^(?:free|malloc|realloc|munmap_chunk)\(\): |^double free or corruption|^corrupted "
    r"|^F\d{4} |Check failed: |^panic: |^\*\*\* SIG\w+ |\*\*\* Process received signal"
)
_NATIVE_FRAME = re.compile(r"^\s*(?:frame #\d+: |#?\d+:? +0x|\d+: )")
_CUDA_ASSERT = re.compile(r"\.cuh?:\d+: .*Assertion ")


@dataclass(frozen=True, slots=True)
class LastWords:
    error: str
    """The line that names the error: the exception, or the line that says most."""
    text: str
    """The traceback with its innermost frames, or the last lines."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Which lines of a log are about the end of its process, as indices.

    Frames of tracebacks and their source lines are in none: they are words of the program's
    author, such as a comment or a guard that did not strike.
    """

    ended: tuple[int, ...]
    """The exception that ended it, then those that it came from, the innermost last. Empty: none
    is known to have ended it."""
    message: tuple[int, ...]
    """The further lines of the first one's message."""
    earlier: tuple[int, ...]
    """Exceptions before that one and not of its chain, which the program handled."""
    others: tuple[int, ...]
    """All other lines that are not blank, in order."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One traceback in a list of lines."""

    start: int
    end: int
    """The index of the line after the one that names the exception."""
    title: str
    frames: tuple[tuple[str, ...], ...]
    error: str
    introduction: str = ""
    """The line before the title."""


def find_last_words(
    lines: Sequence[str], exit_code: int | None, signal: int | None
) -> LastWords | None:
    """Return what a failed process wrote about its end; None: nothing that is about its end.

    Args:
        lines: The end of its log.
        exit_code: Its exit code; negative for a signal; None: not known.
        signal: The signal that ended it, if one did.
    """
    cleaned = clean_lines(lines)
    signal = _find_signal(exit_code, signal)
    return (
        _find_traceback(cleaned, _count_unknown(exit_code, signal))
        or _find_abort(cleaned)
        or (_take_last_lines(cleaned) if signal is None else None)
    )


def clean_lines(lines: Iterable[str]) -> list[str]:
    """Return lines without colors and without the prefix that names a rank, cut to `LONGEST`."""
    return [strip_rank(line) for line in map(_clean_line, lines)]


def _clean_line(line: str) -> str:
    return _ANSI.sub("", line[: 2 * LONGEST])[:LONGEST].rstrip()


def find_last_line(lines: Sequence[str]) -> str:
    """Return the last line that is not known noise; empty: there is none."""
    found = _take_last_lines(clean_lines(lines))
    return found.error if found is not None else ""


def outline_log(cleaned: list[str], exit_code: int | None, signal: int | None) -> Outline:
    """Return which lines are about the end of the process.

    Args:
        cleaned: The end of its log, as `clean_lines` returns it.
        exit_code: As for `find_last_words`.
        signal: As for `find_last_words`.
    """
    signal = _find_signal(exit_code, signal)
    return _outline(cleaned, _count_unknown(exit_code, signal))


def outline_traceback(lines: list[str]) -> Outline:
    """Return which lines of a traceback, and nothing but one, are about the end of its process."""
    return _outline(lines, len(lines))


def is_chained(traceback: str) -> bool:
    """Return whether a traceback has more than one exception."""
    return any(mark in traceback for mark in CHAIN_MARKS)


def _outline(lines: list[str], most: int) -> Outline:
    blocks = _read_blocks(lines)
    inside = {n for block in blocks for n in range(max(block.start, 0), block.end)}
    inside |= _find_stray_frames(lines)
    chosen = _choose_block(lines, blocks, most)
    chain: list[_Block] = []
    message: tuple[int, ...] = ()
    if chosen is not None:
        block, text = chosen
        chain = [block, *_list_origins(block, blocks)]
        message = tuple(range(block.end, block.end + len(text)))
    ended = tuple(_locate(lines, one) for one in chain)
    handled = [
        _locate(lines, one)
        for one in blocks
        if one not in chain and not _IGNORED.search(one.introduction)
    ]
    apart = {*ended, *message, *handled, *inside}
    others = tuple(n for n, line in enumerate(lines) if line.strip() and n not in apart)
    if chosen is None:
        # No exception is known to have ended it, so each of them may be about its end.
        return Outline((), (), (), tuple(sorted((*others, *handled))))
    return Outline(ended, message, tuple(handled), others)


def _list_origins(block: _Block, blocks: list[_Block]) -> list[_Block]:
    """Return the exceptions that one came from, the nearest first."""
    origins: list[_Block] = []
    for before in reversed([one for one in blocks if one.end <= block.start]):
        is_chained = block.title.startswith("Original") or _CHAIN.match(block.introduction)
        if not is_chained:
            break
        origins.append(before)
        block = before
    return origins


def _locate(lines: list[str], block: _Block) -> int:
    """Return the index of the line that names a traceback's exception."""
    inside = range(max(block.start, 0), block.end)
    return next((n for n in reversed(inside) if block.error in lines[n]), block.end - 1)


def _find_stray_frames(lines: list[str]) -> set[int]:
    """Return the frames, and what is indented below them, that no traceback contains.

    faulthandler and py-spy print such stacks, and the start of a traceback may be cut off.
    """
    stray: set[int] = set()
    for first in (n for n, line in enumerate(lines) if _FRAME.match(line)):
        depth = len(lines[first]) - len(lines[first].lstrip())
        stray.add(first)
        for number in range(first + 1, min(first + FRAME_LINES, len(lines))):
            if len(lines[number]) - len(lines[number].lstrip()) <= depth:
                break
            stray.add(number)
    return stray


def _find_signal(exit_code: int | None, signal: int | None) -> int | None:
    if signal is not None or exit_code is None:
        return signal
    return -exit_code if exit_code < 0 else exit_code - 128 if exit_code > 128 else None


def _count_unknown(exit_code: int | None, signal: int | None) -> int:
    """Return how many unknown lines may follow the traceback that ended a process."""
    if signal == SIGABRT or (signal is None and exit_code != 1):
        return AFTER_OTHER
    return AFTER_EXIT_1 if signal is None else AFTER_SIGNAL


def shorten_traceback(text: str) -> LastWords | None:
    """Return a traceback with its innermost frames; None: the text is empty."""
    lines = [_clean_line(line) for line in text.splitlines()]
    return _find_traceback(lines, len(lines)) or _take_last_lines(lines)


# --- tracebacks


def _find_traceback(lines: list[str], most: int) -> LastWords | None:
    """Return the last traceback, where at most so many lines follow that are not known noise."""
    blocks = _read_blocks(lines)
    chosen = _choose_block(lines, blocks, most)
    if chosen is None:
        return None
    block, message = chosen
    before = next((one for one in reversed(blocks) if one.end <= block.start), None)
    introduction = _introduce(lines, block, before)
    if before is not None and _is_reraised(block, before):
        block, introduction = before, []
    if "device-side assert" in block.error:
        introduction = [line for line in lines if _CUDA_ASSERT.search(line)][:1] + introduction
    return LastWords(block.error[:MAX_ERROR], _format(introduction, block, [block.error, *message]))


def _choose_block(
    lines: list[str], blocks: list[_Block], most: int
) -> tuple[_Block, list[str]] | None:
    """Return the traceback that ended the process, and the further lines of its message."""
    # Tracebacks of destructors and of other threads follow the one that ended the process.
    blocks = [
        one for n, one in enumerate(blocks) if not _is_printed_twice(one, blocks[n + 1 : n + 2])
    ]
    own = [one for one in blocks if not _is_secondary(one.introduction)]
    last = own or [one for one in blocks if not _IGNORED.search(one.introduction)]
    if not last:
        return None
    block = last[-1]
    message, unknown = _read_rest(lines, block, [one for one in blocks if one.start > block.start])
    return None if unknown > most else (block, message)


def _read_blocks(lines: list[str]) -> list[_Block]:
    blocks: list[_Block] = []
    titles = [n for n, line in enumerate(lines) if _HEADER.match(line) or _BOX.match(line)]
    if any(_FRAME.match(line) for line in lines[: titles[0] if titles else len(lines)]):
        titles.insert(0, -1)  # its title is above the lines that were read
    for number, start in enumerate(titles):
        if blocks and start < blocks[-1].end:
            continue  # within an exception group
        end = titles[number + 1] if number + 1 < len(titles) else len(lines)
        header = _HEADER.match(lines[start]) if start >= 0 else None
        if header is None and start >= 0:
            block = _read_box(lines, start, end)
        elif header is not None and header["title"].startswith("Exception Group"):
            block = _read_group(lines, start)
        else:
            block = _read_block(lines, start, end, header)
        if block is not None:
            blocks.append(block)
    return blocks


def _read_block(
    lines: list[str], start: int, end: int, header: re.Match[str] | None
) -> _Block | None:
    prefix = header["prefix"] if header else ""
    title = header["title"] if header else "Traceback (most recent call last):"
    body = [line.removeprefix(prefix) for line in lines[start + 1 : end]]
    places = [n for n, line in enumerate(body) if _FRAME.match(line)]
    frames = tuple(_take_frame(body[a:b]) for a, b in pairwise([*places, len(body)]))
    found = _find_exception(body, places[-1] + 1 if places else 0)
    if found is None:
        return None
    if header is None and body[found].startswith(("SyntaxError", "IndentationError", "TabError")):
        title = ""  # of the program itself: Python prints no title for it
    introduction = next((line for line in reversed(lines[: max(start, 0)]) if line.strip()), "")
    return _Block(start, start + found + 2, title, frames, body[found], introduction)


def _take_frame(lines: list[str]) -> tuple[str, ...]:
    """Return the lines of one frame, without what other threads wrote between them."""
    taken = [lines[0]]
    for line in lines[1:]:
        if not line.startswith((" ", "\t")):
            # Another thread's line stands between the frames; the exception's ends them.
            if _is_exception(line):
                break
            continue
        taken.append(line)
    return tuple(line[:MAX_LINE] for line in taken[:FRAME_LINES])


def _find_exception(body: list[str], first: int) -> int | None:
    """Return the index of the line that names the exception, after the last frame."""
    likely = [
        n
        for n, line in enumerate(body[first:], first)
        if line and not line.startswith((" ", "\t")) and not _NOISE.search(line)
    ][:4]
    named = [n for n in likely if _is_exception(body[n])]
    return next((n for n in named if _TYPICAL.match(body[n])), named[0] if named else None)


def _is_exception(line: str) -> bool:
    return bool(_EXCEPTION.match(line)) and not _LEVEL.match(line)


def _read_group(lines: list[str], start: int) -> _Block | None:
    """Return the first exception of a group that is not a group itself.

    Python draws a group as a tree, with `|` before each line and a rule before each exception.
    """
    end = start + 1
    while end < len(lines) and _MARGIN.match(lines[end]):
        end += 1
    parts: list[list[str]] = [[]]
    for line in lines[start:end]:
        margin = _MARGIN.match(line)
        if margin is not None and margin["rule"]:
            parts.append([])
        else:
            own = _MARGIN.sub("", line, count=1)
            parts[-1].append(own.replace("Exception Group Traceback", "Traceback"))
    found = [block for part in parts if (block := _read_part(part)) is not None]
    if not found:
        return None
    leaf = next((one for one in found[1:] if not one.error.split(":")[0].endswith("Group")), None)
    if leaf is None:
        leaf, group = found[0], ""
    else:
        group = found[0].error
    return _Block(start, end, leaf.title, leaf.frames, leaf.error, group)


def _read_part(lines: list[str]) -> _Block | None:
    if blocks := _read_blocks(lines):
        return blocks[-1]
    found = _find_exception(lines, 0)
    return None if found is None else _Block(0, found + 1, "", (), lines[found])


def _read_box(lines: list[str], start: int, end: int) -> _Block | None:
    """Return a traceback that rich has drawn, in Python's own form."""
    frames: list[tuple[str, ...]] = []
    below = start + 1
    for number, line in enumerate(lines[start + 1 : end], start + 1):
        if line.lstrip().startswith(("│", "╭", "╰")):
            below = number + 1
        if frame := _BOX_FRAME.match(line):
            place = f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'
            frames.append((place[:MAX_LINE],))
        elif frames and (source := _BOX_SOURCE.match(line)):
            text = source["source"].replace("│", " ").strip()
            frames[-1] = (*frames[-1], f"    {text}"[:MAX_LINE])
    found = _find_exception(lines[:end], below)
    if found is None:
        return None
    title = "Traceback (most recent call last):"
    return _Block(start, found + 1, title, tuple(frames), lines[found])


def _is_secondary(introduction: str) -> bool:
    return bool(_IGNORED.search(introduction) or _OTHER_THREAD.search(introduction))


def _is_printed_twice(block: _Block, following: list[_Block]) -> bool:
    """Return whether a destructor's exception is printed before the line that says so, too.

    Cython does that, so CuPy, at the end of a process whose GPU has failed.
    """
    return any(
        _IGNORED.search(one.introduction) and (one.error, one.frames) == (block.error, block.frames)
        for one in following
    )


def _read_rest(lines: list[str], block: _Block, later: list[_Block]) -> tuple[list[str], int]:
    """Return the further lines of an exception's message, and how many unknown lines follow it."""
    inside = {n for one in later for n in range(one.start, one.end)}
    message: list[str] = []
    unknown, is_message, is_noise = 0, True, False
    for number, line in enumerate(lines[block.end :], block.end):
        if _ABORT.search(line) or _JAX_EXIT.search(line):
            break  # C++ objects are destroyed after an exception, and that may abort
        is_own = number in inside or _is_secondary(line) or bool(_NOISE.search(line))
        is_noise = is_own or (is_noise and line.startswith((" ", "\t")))
        if is_noise:
            is_message = False
        elif line and not line.startswith((" ", "\t")) and line not in QUOTES:
            unknown += 1
        if is_message and len(message) < MESSAGE_LINES - 1:
            message.append(line)
    while message and not message[-1].strip():
        message.pop()
    return message, unknown


def _introduce(lines: list[str], block: _Block, before: _Block | None) -> list[str]:
    """Return the lines that say how this exception came from another one."""
    sentence = block.introduction
    if before is not None and block.title.startswith("Original"):
        return [before.error]
    if before is not None and _CHAIN.match(sentence):
        return [before.error, "", sentence, ""]
    if _CHILD.match(sentence) or (sentence and _is_group(lines, block)):
        return [sentence]
    return []


def _is_group(lines: list[str], block: _Block) -> bool:
    return block.start >= 0 and "Exception Group Traceback" in lines[block.start]


def _is_reraised(block: _Block, before: _Block) -> bool:
    """Return whether an exception came from a worker process, whose traceback is in quotes."""
    return before.error == block.error and before.introduction in QUOTES


def _format(introduction: Iterable[str], block: _Block, message: list[str]) -> str:
    start = [line[:MAX_LINE] for line in introduction] + ([block.title] if block.title else [])
    left_out = len(block.frames) - INNERMOST - 1
    gap = [(f"  ... {count_noun(left_out, 'frame')} left out ...",)] if left_out > 0 else []
    frames = [*block.frames[:1], *gap, *block.frames[1:][-INNERMOST:]]
    end = "\n".join(message)[:MAX_MESSAGE]
    text = "\n".join((*start, *(line for frame in frames for line in frame), end))
    if len(text) > MAX_TEXT:
        text = "\n".join((*start, *(frame[0] for frame in frames), end))
    return text[-MAX_TEXT:]


# --- programs that leave no traceback


def _find_abort(lines: list[str]) -> LastWords | None:
    """Return the last lines of a program that native code ended."""
    first = max(0, len(lines) - NATIVE_LINES)
    start = next((n for n, line in enumerate(lines[first:], first) if _NATIVE.search(line)), None)
    if start is None:
        return None
    lines = lines[start:]
    said = next((line.strip() for line in lines if line.strip().startswith("what():")), "")
    error = lines[0]
    if said.removeprefix("what():").strip():
        error = said.removeprefix("what():").strip()
    elif error.endswith(":") and len(lines) > 1:
        error = f"{error} {lines[1].strip()}"  # Rust puts the message below the place
    if error.startswith("Fatal Python error") and (
        current := [n for n, line in enumerate(lines) if line.startswith("Current thread ")]
    ):
        # faulthandler lists all threads; the innermost frame comes first.
        lines = [lines[0], *lines[current[0] : current[0] + INNERMOST + 1]]
    kept: list[str] = []
    frames = 0
    for line in lines:
        frames += bool(_NATIVE_FRAME.match(line))
        is_new = line.strip() and not _NOISE.search(line)
        if is_new and not (_NATIVE_FRAME.match(line) and frames > INNERMOST):
            kept.append(line[:MAX_LINE])
    return LastWords(error[:MAX_ERROR], "\n".join(kept[:MESSAGE_LINES])[:MAX_TEXT])


def _take_last_lines(lines: list[str]) -> LastWords | None:
    kept = [line[:MAX_LINE] for line in lines if line.strip() and not _NOISE.search(line)]
    if not kept:
        return None
    return LastWords(kept[-1].strip()[:MAX_ERROR], "\n".join(kept[-LAST_LINES:]))
