"""The order `last-words`: what ranks that have not ended wrote last, and whether they are ending.

A rank that has failed may take long to end: handlers run at its exit, it gives back much memory, or
the kernel writes its core dump. Changes nothing. What the words mean is judged elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import List

from relaunch.agent import processes, reports
from relaunch.agent.protocol import Fields, Json, line
from relaunch.agent.ranks import evidence, journal
from relaunch.agent.ranks.redact import Redactor

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Bytes of an answer from which on no further rank is read: a line of a session has at most 8
MiB."""


def read_last_words(state: Path, order: Fields) -> Json:
    generation, ranks = reports.find_generation(state, order)
    groups, pids = generation.groups, generation.pids
    rows: List[Json] = []
    # A launcher reports the ranks below it, with what they wrote, once it has ended.
    if groups and not generation.launched_ranks:
        redactor = Redactor.read(generation)
        exited = journal.list_exited(journal.read(generation.journal))
        left = MAX_ANSWER_BYTES
        for number, rank in enumerate(ranks):
            if rank in exited or rank not in pids or left < 0:
                continue
            row = {
                "rank": rank,
                "local_rank": number,
                "pid": pids[rank][0],
                "state": processes.read_ending(*pids[rank]),
                **evidence.read_written(generation, rank, redactor, time.time()),
            }
            left -= len(line(row))
            rows.append(row)
    return {"outcome": "done", "ranks": rows}
