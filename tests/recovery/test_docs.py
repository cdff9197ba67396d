"""docs/recovery.md: generated parts follow the code, its examples load, its commands work.

After an intended change, write the generated parts again: `python -m tests.recovery.test_docs`.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from relaunch.cli import app
from relaunch.cli.event_file import EventFile, read_events
from relaunch.cli.policies import read, read_changes
from relaunch.cli.policy_replay import Trial, try_on_events
from relaunch.cli.policy_views import ladders
from relaunch.config import ConfigError
from relaunch.evidence.causes import OWN_CAUSES, Cause
from relaunch.evidence.observations import Observation, RankExited, RanksFenced, RanksVanished
from relaunch.evidence.reachability import LINK, NODE_LINK, LinkFindings
from relaunch.fields import duration
from relaunch.job.diagnose import NEVER_WATCHED, REFUSAL_CAUSES, diagnose, signal_name
from relaunch.job.events import (
    Event,
    FaultObserved,
    LaunchRefused,
    NodeRefusal,
    NodesExamined,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    RanksSucceeded,
    RepairEnded,
)
from relaunch.job.replay import name_decision
from relaunch.job.state import Decision, Ignore, Relaunch, Repair, Stop
from relaunch.messages.jobs import overlay
from relaunch.spec.policy import Policy, Rung, preset
from relaunch.text import omit_said
from tests.console.page_commands import code_lines
from tests.recovery.builders import exited, new_job

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recovery.md"
INCIDENTS = ROOT / "docs" / "incidents"
BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w ]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL
)
LONGEST = 468
"""Lines: as many as a person reads in ten minutes."""
SHORT = 80
"""Characters of evidence that stand on one line with what was decided about it."""

REFUSED = (
    "causes: {HANG: [{strategy: FAIL, tries: 2}]}",
    "causes: {HANG: [{strategy: ASK}, {strategy: FAIL}]}",
    "causes: {HANG: [{strategy: RESTART_IN_PLACE, isolate: true}]}",
    "causes: {HANG: [{strategy: RESTART_IN_PLACE, consecutive: true, window: 1h}]}",
    "causes: {HANG: [{strategy: RESTART_IN_PLACE, tries: 3, delay: 5}]}",
    "timeouts: {lease: 20s}",
    "hang: {after: 20s}",
    "hang: {after: 5m}\ntimeouts: {collective: 10m}",
    "max_restart: 3",
)
"""What people write, each with its sentence in the page."""


# --- the generated parts ------------------------------------------------------------------------


def generated() -> dict[str, str]:
    parts = {f"incident {cause}": incident(path_of(cause)) for cause in Cause}
    return {"ladders": ladder_table(preset("default")), "refusals": refusals(), **parts}


def path_of(cause: Cause) -> Path:
    return INCIDENTS / f"{cause.lower()}.jsonl"


def ladder_table(policy: Policy) -> str:
    rows = ["| cause | what is tried, from the left |", "|---|---|"]
    for causes, ladder in ladders(policy, None):
        names = ", ".join(f"[{cause}](#{cause.lower()})" for cause in causes)
        rows.append(f"| {names} | {' → '.join(map(_rung, ladder))} |")
    return "\n".join(rows) + "\n"


def _rung(rung: Rung) -> str:
    text = f"`{rung.strategy}`"
    if rung.codes:
        text += f" on {', '.join(f'`{code}`' for code in rung.codes)}"
    if rung.when:
        text += f" when {' or '.join(rung.when)}"
    if rung.tries is not None:
        text += f" ×{rung.tries}"
    if rung.key != ("cause",):
        text += f" for each {', '.join(key for key in rung.key if key != 'cause')}"
    if rung.window is not None:
        text += f" in {duration(rung.window)}"
    if rung.delay:
        delays = [rung.delay_of(used) for used in range(rung.tries or 1)]
        text += f" after {', '.join(map(duration, dict.fromkeys(delays)))}"
    if rung.isolate:
        text += ", isolates"
    return text + (", **spends**" if rung.spends and not rung.strategy.ends else "")


def refusals() -> str:
    rows = ["| written | refused with |", "|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        for text in REFUSED:
            file.write_text(text + "\n")
            with pytest.raises(ConfigError) as refusal:
                read(str(file))
            sentence = re.sub(rf"^{re.escape(folder)}/policy.yaml:\d+: ", "", str(refusal.value))
            rows.append(f"| `{text.replace(chr(10), '; ')}` | {sentence} |")
    return "\n".join(rows) + "\n"


def incident(path: Path) -> str:
    """Each piece of evidence and what was decided about it, from the first fault on."""
    lines: list[str] = []
    before, seen = "", set[str]()
    for at, evidence, decision in _rows(path):
        if evidence is None:
            lines[-1] += f" → {decision.reason}"
            continue
        shown = "the same again" if evidence in seen and len(evidence) > SHORT / 2 else evidence
        seen.add(evidence)
        lines += (
            [f"- `{at}` {shown}", f"  - {_decided(decision, before)}"]
            if len(shown) > SHORT
            else [f"- `{at}` {shown} → {_decided(decision, before)}"]
        )
        if "; " in decision.reason:
            before = decision.reason
    return "\n".join(lines) + "\n"


def _decided(decision: Decision, before: str) -> str:
    text = f"**{name_decision(decision)}** {omit_said([decision.reason], [before])[0]}"
    if isinstance(decision, Relaunch) and decision.delay:
        text += f", after {duration(decision.delay)}"
    return text + (
        f" *Left: {decision.left}.*"
        if isinstance(decision, Relaunch | Repair) and decision.left
        else ""
    )


def _rows(path: Path) -> Iterator[tuple[str, str | None, Decision]]:
    """Time, evidence (None: it follows from what was decided before), decision."""
    policy = preset("default")
    file: EventFile = read_events(path, policy)
    trial: Trial = try_on_events(policy, path)
    told = list(file.steps)
    begun, evidence = False, None
    for one in trial.replayed:
        if told and (told[0].at, told[0].event.kind) == (one.at, one.event):
            evidence = words(told.pop(0).event)
            begun = begun or not isinstance(one.decision, Ignore)
        if isinstance(one.decision, Ignore) or not begun:
            continue
        assert evidence or one.event in ("Launched", "DeadlinePassed"), (
            f"{path.name}: {one.event} at {trial.format_time(one.at)} has no evidence"
        )
        if one.event == "DeadlinePassed":
            evidence = "nothing more was heard"
        yield trial.format_time(one.at), evidence, one.decision
        evidence = None
    assert not told, f"{path.name}: not reached: {told[0].event.kind}"


def words(event: Event) -> str:
    match event:
        case FaultObserved():
            others = f"; {event.more} other ranks" if event.more else ""
            return "; ".join(map(_observed, event.observations)) + others
        case LaunchRefused():
            return "; ".join(
                f"{each.node} refuses to start ({each.why}): {each.reason}"
                for each in event.refusals
            )
        case RanksHung():
            return f"training stands still: {event.reason}"
        case NodeUnreachable():
            return f"{event.node} does not answer for {duration(event.unheard_for)}: {event.reason}"
        case NodesExamined(links=LinkFindings() as links):
            return f"called each other: {links.reason}"
        case NodesExamined(foreign=tuple() as foreign):
            found = "; ".join(f"{each.node}: {each.processes}" for each in foreign)
            return f"asked who uses its GPUs: {found or 'no foreign process'}"
        case NodesExamined():
            return "examined: " + "; ".join(
                f"{each.node} {each.verdict}, {each.reason}" for each in event.examined
            )
        case RepairEnded():
            return f"the repair is {event.outcome}: {event.reason}"
        case ProgressSeen():
            return f"step {event.step} is reported"
        case RanksSucceeded():
            return "all ranks exit with 0"
        case _:
            raise AssertionError(f"say how {event.kind} reads")


def _observed(observation: Observation) -> str:
    match observation:
        case RankExited():
            end = (
                signal_name(observation.signal)
                if observation.signal is not None
                else f"exit {observation.exit_code}"
            )
            parts = [f"rank {observation.rank} on {observation.node}: {end}"]
            if observation.error:
                parts.append(f"error file `{observation.error.message}`")
            if observation.log_tail:
                parts.append("log " + " ".join(f"`{line}`" for line in observation.log_tail))
            if observation.kernel:
                parts.append("kernel " + " ".join(f"`{line}`" for line in observation.kernel))
            return ", ".join(parts)
        case RanksVanished() | RanksFenced():
            return f"{observation.node}: {observation.reason}"


# --- what holds ---------------------------------------------------------------------------------


def page() -> str:
    return PAGE.read_text()


def test_the_generated_parts_are_what_the_code_says_now() -> None:
    written = {found["name"]: found["text"] for found in BLOCK.finditer(page())}
    assert written == generated(), "python -m tests.recovery.test_docs"


def test_the_page_is_short_enough_to_be_read() -> None:
    assert len(page().splitlines()) <= LONGEST


def test_each_cause_has_its_incident_and_nothing_else_has() -> None:
    assert {path.name for path in INCIDENTS.iterdir()} == {path_of(cause).name for cause in Cause}
    assert re.findall(r"^### (\S+)$", page(), re.MULTILINE) == [str(cause) for cause in Cause]


def diagnosed(cause: Cause) -> Cause:
    """The cause of the first fault of its incident."""
    first = next(
        step.event
        for step in read_events(path_of(cause), preset("default")).steps
        if not isinstance(step.event, ProgressSeen)
    )
    if isinstance(first, NodeUnreachable):
        return Cause.NODE_LOST
    assert isinstance(first, FaultObserved | RanksHung | LaunchRefused)
    return diagnose(new_job(), first).cause


@pytest.mark.parametrize("cause", list(Cause))
def test_each_incident_goes_from_its_cause_to_training_or_an_end(
    cause: Cause,
) -> None:
    decisions = [decision for *_, decision in _rows(path_of(cause))]
    assert diagnosed(cause) is cause
    assert isinstance(decisions[-1], Stop) or decisions[-1].reason.startswith(
        "training passed step"
    )


def cause_rows() -> list[tuple[Cause, str, list[str]]]:
    found = re.findall(r"^\| `([A-Z_]+)` \|[^|]*\|([^|]*)\|(.*)\|$", page(), re.MULTILINE)
    return [
        (Cause(name), whose.strip(), re.findall(r"`([^`]+)`", evidence))
        for name, whose, evidence in found
    ]


def test_the_table_of_causes_has_each_and_whose_fault_it_may_be() -> None:
    rows = cause_rows()
    assert [cause for cause, *_ in rows] == list(Cause)
    assert [cause for cause, whose, _ in rows if "the job" in whose] == [
        cause for cause in Cause if cause in OWN_CAUSES
    ]


@pytest.mark.parametrize(
    ("cause", "snippet"),
    [(cause, snippet) for cause, _, snippets in cause_rows() for snippet in snippets],
)
def test_evidence_in_the_table_is_read_as_its_cause(cause: Cause, snippet: str) -> None:
    assert diagnose(new_job(), shown(snippet)).cause is cause


def shown(snippet: str) -> FaultObserved | LaunchRefused:
    if snippet in REFUSAL_CAUSES:
        return LaunchRefused(1, (NodeRefusal("n2", snippet, "…"),))
    if snippet == NEVER_WATCHED:
        return FaultObserved(1, (RanksFenced("n2", exited().at, snippet, "…"),), 0, exited().at)
    return FaultObserved(1, (_shows(snippet),), 0, exited().at)


KERNEL_CODES = {
    "mce": "mce: Uncorrected hardware memory error in user-access at 2e1f3f0140",
    "edac": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0",
    "aer": "pcieport 0000:40:01.1: AER: device recovery failed",
    "nic-fault": "mlx5_core 0000:41:00.0: mlx5_health_try_recover: health recovery failed",
    "lockup": "watchdog: Watchdog detected hard LOCKUP on cpu 3",
    "oops": "BUG: unable to handle kernel NULL pointer dereference at 0000000000000040",
    "panic": "Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000009",
}
"""A line of the kernel log for each code that a policy names."""


def _shows(snippet: str) -> RankExited:
    """Return a rank that ended with this: an Xid, exit, signal, a line of the kernel or its own."""
    if line := KERNEL_CODES.get(snippet):
        return exited(signal=9, kernel=(line,))
    if found := re.fullmatch(r"Xid (\d+)", snippet):
        return exited(
            code=1, kernel=(f"NVRM: Xid (PCI:0000:05:00): {found[1]}, pid=7, name=python3, Ch 8",)
        )
    if found := re.fullmatch(r"exit (\d+)", snippet):
        return exited(code=int(found[1]))
    if snippet in ("SIGKILL", "SIGTERM", "SIGSEGV"):
        return exited(signal={"SIGKILL": 9, "SIGTERM": 15, "SIGSEGV": 11}[snippet])
    if snippet.startswith(("EDAC", "nfs:", "oom-kill:", "EXT4-fs")):
        return exited(signal=9, kernel=(snippet,), pid=4242)
    return exited(code=1, log_tail=(snippet,))


def examples() -> dict[str, str]:
    return dict(re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", page(), re.DOTALL))


def command_lines() -> list[str]:
    return [line for line in code_lines(page()) if line.startswith("relaunch ")]


def test_every_example_is_a_policy_that_can_be_used(tmp_path: Path) -> None:
    written = examples()
    assert len(written) == len(re.findall("```yaml", page())) >= 3
    for name, text in written.items():
        (tmp_path / name).write_text(text)
        policy = read(str(tmp_path / name))
        named_codes = [
            (cause, code)
            for cause, ladder in policy.causes.items()
            for rung in ladder
            for code in rung.codes
            if code not in (LINK, NODE_LINK)  # no rank says it: see test_reachability
        ]
        assert [
            (diagnose(new_job(policy=policy), shown(code)).cause, code) for _, code in named_codes
        ] == named_codes


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_works_as_it_is_printed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in examples().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    command: Any = get_command(app.app)
    words = shlex.split(line)[1:]
    context = command.context_class(command, info_name="relaunch")
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.context_class(command, info_name=name, parent=context)
    context = command.make_context(command.name, words, parent=context.parent)
    if "policy change" in line:  # it needs a job: here, only what it would say to one
        changes = read_changes(context.params["file"], context.params["values"] or [])
        assert overlay(preset("default"), changes.keys) != preset("default")
    elif "--history" in line:
        read(context.params["policy"])
    else:
        command.invoke(context)


def test_there_are_command_lines_to_try() -> None:
    tried = " ".join(command_lines())
    for word in (
        "policy check",
        "policy explain",
        "policy replay",
        "policy change",
        "explain xid",
        "--history",
        "--events",
        "--set",
    ):
        assert word in tried


def write() -> None:
    parts = generated()
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{parts[found['name']]}{found[4]}", page()))


if __name__ == "__main__":
    write()
