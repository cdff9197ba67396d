"""Attacks on the promise that no two generations of a job are alive at once.

Each runs a job and does it harm.

What an attack waits for and does not come is noted, and is no violation: the machine may be busy,
and to launch nothing is always safe. Violations are read from the stamps of the ranks afterwards
(`FenceJob.overlaps`).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaunch.activities.fleet import FLEET_ID_PREFIX
from relaunch.backends.local_power import signal_all
from relaunch.cli import jobs
from tests.backends.sshd import Sshd
from tests.chaos import clocks, disks
from tests.chaos.rival import Rival
from tests.chaos.world import FLEET, chaos_policy
from tests.fence.hosts import PYTHON, Host
from tests.fence.world import FenceJob, FenceWorld, Generation

STRAY_PROGRAM = Path(__file__).with_name("stray.py")
SLOW_FENCE = {"lease": "8s", "fence_after": "8s"}
"""Time-outs whose fence lasts longer than FENCE_MARGIN covers: a fence that is judged wrong shows.
"""


@dataclass
class Attempt:
    """One play of an attack, and what came of it."""

    world: FenceWorld
    random: random.Random
    log: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    job: FenceJob | None = None
    before: Generation = (0, 0)
    """The newest generation when the harm was done."""
    faults: list[str] = field(default_factory=list)
    """What must not happen and shows in no stamp, a sentence each."""
    has_launched: bool = False
    """Whether a newer generation was launched afterwards."""
    has_ended_first: bool = False
    """Whether the older ranks ended before that: then nothing can overlap any more."""

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:6.1f}  {text}")

    async def run(self, **more: Any) -> FenceJob:
        """Run the job that the harm is done to."""
        self.job = await self.world.run_ranks(**more)
        self.before = max(self.job.first_starts())
        self.note(f"{self.job.name} runs on {', '.join(self.job.nodes())}")
        return self.job

    async def sleep(self, least: float, most: float = 0.0) -> None:
        await asyncio.sleep(self.random.uniform(least, max(least, most)))

    async def await_newer(
        self, victim: Host | None = None, patience: float = 60.0, after: float = 2.0
    ) -> None:
        """Wait until a newer generation has run a while, or the victim's ranks have ended."""
        assert self.job is not None
        deadline = time.monotonic() + patience
        while max(self.job.first_starts()) == self.before:
            if time.monotonic() > deadline:
                self.note(f"no newer generation within {patience:g} s: {await self.explain()}")
                return
            if victim is not None and not self.job.ranks_on(victim):
                self.has_ended_first = True
                self.note(
                    f"ranks on {victim.name} have ended, and no newer generation was launched"
                )
                return
            await asyncio.sleep(0.1)
        self.has_launched = True
        self.note(f"{max(self.job.first_starts())[1]} is launched on {', '.join(self.job.nodes())}")
        await asyncio.sleep(after)

    async def await_end(self, host: Host, patience: float = 40.0) -> None:
        """Wait until the job's ranks on a host have ended, to measure how long they lived on."""
        assert self.job is not None
        ended = await self.job.until_ended_on(host, patience)
        self.note(
            f"older ranks on {host.name} "
            + ("have ended" if ended else f"live on after {patience:g} s")
        )

    async def explain(self) -> str:
        assert self.job is not None
        state = (await self.job.look()).state
        return (
            "its state cannot be read" if state is None else f"{state.phase}: {state.reason}"[:240]
        )


Play = Callable[[Attempt], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    name: str
    play: Play
    shows: str
    """What it does, in one line."""
    world: Mapping[str, Any]
    """Of the world that it needs."""
    can_share: bool
    """Whether other attacks may go on beside it in its world, on other nodes."""
    obstacle: Callable[[], str | None]


ATTACKS: dict[str, Attack] = {}


def attack(
    *,
    nodes: int = 2,
    spares: int = 1,
    can_share: bool = True,
    obstacle: Callable[[], str | None] = lambda: None,
    **world: Any,
) -> Callable[[Play], Play]:
    """Register an attack under the name of its function."""

    def register(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        shows = (play.__doc__ or "").strip().splitlines()[0]
        needs = {"nodes": nodes, "spares": spares, **world}
        ATTACKS[name] = Attack(name, play, shows, needs, can_share, obstacle)
        return play

    return register


def find_no_compiler() -> str | None:
    return None if shutil.which("gcc") else "gcc is missing"


def find_no_tmpfiles() -> str | None:
    return None if shutil.which("systemd-tmpfiles") else "systemd-tmpfiles is missing"


# --- networks


@attack()
async def cut(attempt: Attempt) -> None:
    """A node is cut off from everything."""
    job = await attempt.run(times={"fence_after": "6s"})
    await attempt.sleep(0.0, 1.5)
    victim = job.hosts()[-1]
    attempt.world.network.isolate(victim.name)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


@attack()
async def one_way(attempt: Attempt) -> None:
    """A node hears the controller and its peers, and what it says gets lost.

    Or the other way round.
    """
    job = await attempt.run(times={"fence_after": "6s"})
    await attempt.sleep(0.0, 1.5)
    victim, network = job.hosts()[-1], attempt.world.network
    ends = (victim.name, "*") if attempt.random.random() < 0.5 else ("*", victim.name)
    attempt.note(f"frames from {ends[0]} to {ends[1]} get lost")
    network.set_link(*ends, loss=1.0)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


@attack(nodes=3, spares=2)
async def witness(attempt: Attempt) -> None:
    """A peer that still holds its lease vouches for a cut-off node.

    Until it is stopped itself, last of all.
    """
    lease = 20.0
    times = {"lease": f"{lease:g}s", "fence_after": "8s", "lost_after": "300s"}
    job = await attempt.run(
        nodes=3, policy=chaos_policy(times, hang={"after": f"{lease + 2:g}s", "first_step": "60s"})
    )
    await attempt.sleep(lease / 3)  # each lease was renewed at least once: every sixth of it
    first, middle, last = job.hosts()
    network = attempt.world.network
    for other in ("c1", "c2", first.name):
        network.set_links(middle.name, other, loss=1.0)
    await attempt.sleep(lease)
    for controller in ("c1", "c2"):
        network.set_links(last.name, controller, loss=1.0)
    attempt.note(f"{middle.name} hears {last.name} only; {last.name} has just lost the controller")
    stopped = await job.until_ended_on(first, 60.0)
    attempt.note(
        f"{first.name} is stopped: {stopped}; ranks: "
        f"{[len(job.ranks_on(h)) for h in (middle, last)]}"
    )
    await attempt.sleep(14.5)  # fence, grace and margin after the first stop, and a little
    for controller in ("c1", "c2"):
        network.set_links(last.name, controller)
    network.set_links(middle.name, last.name, loss=1.0)
    attempt.note(f"{last.name} is back; ranks: {[len(job.ranks_on(h)) for h in (middle, last)]}")
    await attempt.await_newer(middle)
    await attempt.await_end(middle)


@attack()
async def flapping(attempt: Attempt) -> None:
    """A node is lost and comes back, again and again, while a fault is gathered."""
    job = await attempt.run(times={**SLOW_FENCE, "lost_after": "1.5s"})
    victim, network = job.hosts()[-1], attempt.world.network
    for _ in range(attempt.random.randint(2, 4)):
        network.isolate(victim.name)
        await attempt.sleep(1.5, 5.0)
        network.set_links(victim.name, "*")
        await attempt.sleep(0.3, 2.0)
    if attempt.random.random() < 0.5:
        job.fail(0)
        await attempt.sleep(0.0, 1.0)
    network.isolate(victim.name)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


@attack()
async def black_hole(attempt: Attempt) -> None:
    """Large packets get lost between the controller and a node.

    As on a path whose MTU is smaller than announced.
    """
    job = await attempt.run(times={"fence_after": "6s"})
    victim = job.hosts()[-1]
    attempt.world.network.set_links("c1", victim.name, largest=300)
    await attempt.sleep(3.0, 6.0)
    job.fail(0)
    await attempt.await_newer()


# --- which machine answers


@attack()
async def machine_id(attempt: Attempt) -> None:
    """A node's /etc/machine-id is written again while ranks run, and its session begins afresh."""
    job = await attempt.run(times=SLOW_FENCE)
    victim = job.hosts()[-1]
    victim.machine_id.write_text(uuid.uuid4().hex + "\n")
    victim.signal_kind("session", signal.SIGKILL)
    await attempt.sleep(3.0)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


@attack(can_share=False)
async def address(attempt: Attempt) -> None:
    """The fleet file with the address of another host for a node is applied.

    As after a renumbering.
    """
    job = await attempt.run(times=SLOW_FENCE)
    victim, network = job.hosts()[-1], attempt.world.network
    spare = next(host for name, host in network.hosts.items() if name not in job.nodes())
    # The other host is no node itself: no two nodes may have one address.
    attempt.world.write_fleet(
        {victim.name: {"address": spare.address, "network": spare.address}, spare.name: None}
    )
    _, said = await attempt.world.run_starter(
        "nodes", "apply", "--reason", "renumbered", "--fleet", FLEET
    )
    attempt.note(" ".join(said.split())[:200])
    await attempt.sleep(3.0)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


@attack(can_share=False)
async def user(attempt: Attempt) -> None:
    """The fleet file names another user, whose agents keep their state elsewhere."""
    job = await attempt.run(times=SLOW_FENCE)
    victim = job.hosts()[-1]
    attempt.world.write_fleet(ssh={"user": "train"})
    _, said = await attempt.world.run_starter(
        "nodes", "apply", "--reason", "new user", "--fleet", FLEET
    )
    attempt.note(" ".join(said.split())[:200])
    await attempt.sleep(3.0)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


@attack(can_share=False)
async def swapped(attempt: Attempt) -> None:
    """Another host with the same SSH host key answers at a node's address.

    The node's peers see the real one; another node's rank fails.
    """
    network, world = attempt.world.network, attempt.world
    victim, impostor = network.hosts["n2"], network.hosts["n3"]
    _share_host_key(victim, impostor)
    world.places.known_hosts.write_text("".join(h.known_hosts for h in network.hosts.values()))  # type: ignore[attr-defined]
    job = await attempt.run(times=SLOW_FENCE)
    network.answer_for(victim.name, impostor.name)
    try:
        await attempt.sleep(1.0, 4.0)
        job.fail(0)
        await attempt.await_newer(victim)
        await attempt.await_end(victim, 30.0)
    finally:
        network.answer_for_itself(victim.name, impostor.name)


def _share_host_key(original: Host, copy: Sshd) -> None:
    """As two machines have it that were made from one image.

    The copy answers at every address of its host.
    """
    for ours, its in zip(original.host_keys, copy.host_keys, strict=True):
        shutil.copy(ours, its)
        shutil.copy(ours.with_suffix(".pub"), its.with_suffix(".pub"))
    copy.kill()
    address, copy.address = copy.address, "0.0.0.0"
    copy.start()
    copy.address = address


# --- what an agent keeps on its disk


@attack()
async def state_deleted(attempt: Attempt) -> None:
    """A node's state folder is deleted while ranks run, and its sessions end."""
    job = await attempt.run(times=SLOW_FENCE)
    victim = job.hosts()[-1]
    (rank,) = job.ranks_on(victim)
    _delete(victim.state_of(rank))
    victim.signal_kind("session", signal.SIGKILL)
    await attempt.sleep(0.0, 3.0)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


@attack()
async def jobs_deleted(attempt: Attempt) -> None:
    """The folder `jobs` of a node's state is deleted while ranks run, as by a tidy person."""
    job = await attempt.run(times=SLOW_FENCE)
    victim = job.hosts()[-1]
    (rank,) = job.ranks_on(victim)
    _delete(victim.state_of(rank) / "jobs")
    await attempt.sleep(0.0, 3.0)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


def _delete(folder: Path) -> None:
    """Delete a folder in which ranks write meanwhile; what is made again afterwards stays."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


@attack(obstacle=find_no_tmpfiles)
async def tmpfiles(attempt: Attempt) -> None:
    """systemd-tmpfiles removes from /var/tmp what was not used for 3 s.

    Fedora and RHEL: for 30 days.
    """
    job = await attempt.run(times=SLOW_FENCE)
    victim = job.hosts()[-1]
    await attempt.sleep(6.0)
    config = victim.folder / "tmpfiles.conf"
    config.write_text("q /var/tmp 1777 root root 3s\n")
    victim.run("systemd-tmpfiles", "--clean", str(config))
    if attempt.random.random() < 0.5:
        victim.signal_kind("session", signal.SIGKILL)
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    await attempt.await_end(victim, 10.0)


@attack(obstacle=disks.find_obstacle, can_share=False, has_disks=True)
async def disk_frozen(attempt: Attempt) -> None:
    """The disk of a node takes no writes any more, and the node is cut off."""
    job = await attempt.run(times={"fence_after": "6s"})
    victim = job.hosts()[-1]
    (
        job.folder / "quiet"
    ).touch()  # else the ranks wait for the disk, too, and nothing can end them
    await attempt.sleep(0.5)
    assert victim.disk is not None
    victim.disk.freeze()
    try:
        attempt.world.network.isolate(victim.name)
        job.fail(0)
        await attempt.await_newer(victim)
        await attempt.await_end(victim, 15.0)
    finally:
        victim.disk.thaw()


# --- times of one generation, judged by those of another


@attack()
async def policy_changed(attempt: Attempt) -> None:
    """`policy change` shortens the fence of ranks that already run, then a node is cut off."""
    job = await attempt.run(times={"fence_after": "20s"})
    change = {"policy": {"timeouts": {"fence_after": "0.5s"}}, "reason": "faster", "by": "a"}
    answer = await jobs.handle_of(attempt.world.client, job.name).execute_update(
        "change_policy", change
    )
    attempt.note(f"policy change: {answer}"[:200])
    victim = job.hosts()[-1]
    attempt.world.network.isolate(victim.name)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


@attack()
async def resubmitted(attempt: Attempt) -> None:
    """A job is terminated during a cut and submitted again with shorter time-outs.

    Under the same name.
    """
    await _resubmit(attempt, with_fleet=False)


@attack(nodes=3, spares=0, can_share=False)  # a free node, which is no spare
async def fleet_terminated(attempt: Attempt) -> None:
    """As `resubmitted`, with the same time-outs; the fleet's workflow is terminated, too."""
    await _resubmit(attempt, with_fleet=True)


@attack(can_share=False)
async def resubmitted_elsewhere(attempt: Attempt) -> None:
    """A job is terminated and submitted again after its host changed and its controller died.

    A node gets another host's address in the fleet file, and worker and server are killed.

    The machine that was renumbered is cut off: its peers would tell it of the newer submission, and
    it would stop by itself.
    """
    times = {"lease": "8s", "fence_after": "20s"}
    job = await attempt.run(times=times)
    victim, world = job.hosts()[-1], attempt.world
    spare = next(host for name, host in world.network.hosts.items() if name not in job.nodes())
    await jobs.handle_of(world.client, job.name).terminate("an operator")
    world.network.isolate(victim.name)
    world.write_fleet(
        {victim.name: {"address": spare.address, "network": spare.address}, spare.name: None}
    )
    _, said = await world.run_starter("nodes", "apply", "--reason", "renumbered", "--fleet", FLEET)
    attempt.note(" ".join(said.split())[:200])
    for process in (world.worker, world.server):
        await process.end(signal.SIGKILL)
    for process in (world.server, world.worker):
        await process.start()
    attempt.job = await world.submit_ranks(name=job.name, times=times)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


async def _resubmit(attempt: Attempt, with_fleet: bool) -> None:
    times = {"lease": "8s", "fence_after": "30s"}
    job = await attempt.run(times=times)
    victim, world = job.hosts()[-1], attempt.world
    world.network.isolate(victim.name)
    await attempt.sleep(1.0)
    await jobs.handle_of(world.client, job.name).terminate("an operator")
    if with_fleet:
        await world.client.get_workflow_handle(f"{FLEET_ID_PREFIX}{FLEET}").terminate("an operator")
    attempt.job = await world.submit_ranks(name=job.name, times=times if with_fleet else None)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


# --- another server


@attack(can_share=False)
async def two_servers(attempt: Attempt) -> None:
    """Another server's worker launches a job of the same names on the same nodes.

    Then a rank of ours fails.
    """
    job = await attempt.run(times=SLOW_FENCE)
    rival = Rival(attempt.world)
    await rival.start()
    await rival.submit(job.name, len(job.nodes()))
    attempt.note(f"the other server's job is {await rival.await_launch(job.name, 45.0)}")
    after = await attempt.explain()
    attempt.note(f"ours: {after}")
    if max(job.first_starts()) != attempt.before or "submission" in after:
        attempt.faults.append(f"the other server's launch stopped ours: {after}")
        return
    job.fail(0)
    await attempt.await_newer(patience=30.0)
    attempt.note(f"ours: {await attempt.explain()}")


# --- processes that stand still


@attack()
async def paused(attempt: Attempt) -> None:
    """A host is paused for longer than its lease and fence, and goes on.

    Beside a newer generation.
    """
    job = await attempt.run()
    victim, world = job.hosts()[-1], attempt.world
    world.pause(victim)
    try:
        await attempt.await_newer(after=1.0)
        await attempt.sleep(0.0, 2.0)
    finally:
        world.resume(victim)
    await attempt.await_end(victim, 15.0)


@attack(obstacle=clocks.find_obstacle, can_share=False, clocks=True)
async def paused_clock(attempt: Attempt) -> None:
    """As `paused`, and CLOCK_BOOTTIME of the host stood still.

    As in a paused virtual machine.
    """
    job = await attempt.run(times={"lease": "6s", "fence_after": "6s"})
    world, victim = attempt.world, job.hosts()[-1]
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    world.pause(victim)
    world.network.isolate(victim.name)  # the kernel of a paused machine takes no packets either
    try:
        await attempt.await_newer(after=1.0)
        world.network.set_links(victim.name, "*")
    finally:
        world.clocks_of[victim.name].step_boot(begun - time.clock_gettime(time.CLOCK_BOOTTIME))
        world.resume(victim)
    await attempt.await_end(victim, 30.0)


@attack(obstacle=clocks.find_obstacle, can_share=False, clocks=True)
async def controller_clock(attempt: Attempt) -> None:
    """The controller's wall clock is stepped by minutes while it waits for a fence.

    That of a node that is cut off.
    """
    job = await attempt.run(times={"lease": "6s", "fence_after": "15s"})
    world, victim = attempt.world, job.hosts()[-1]
    world.network.isolate(victim.name)
    # The other nodes are stopped, and the wait has begun.
    await job.until_ended_on(job.hosts()[0], 60.0)
    await attempt.sleep(0.5, 2.0)
    world.clocks_of["worker"].step_wall(180.0)
    await attempt.await_newer(victim)
    await attempt.await_end(victim)


@attack()
async def shim_stopped(attempt: Attempt) -> None:
    """The shim of a node stands still (SIGSTOP), and the node is cut off."""
    job = await attempt.run()
    victim = job.hosts()[-1]
    pids = victim.signal_kind("shim", signal.SIGSTOP)
    attempt.world.network.isolate(victim.name)
    await attempt.await_newer(victim)
    await attempt.await_end(victim, 15.0)
    signal_all(pids, signal.SIGCONT)


@attack()
async def shim_stopped_in_reach(attempt: Attempt) -> None:
    """The shim of a node stands still (SIGSTOP), and another node's rank fails."""
    job = await attempt.run()
    victim = job.hosts()[-1]
    pids = victim.signal_kind("shim", signal.SIGSTOP)
    await attempt.sleep(0.0, 2.0)
    job.fail(0)
    await attempt.await_newer()
    await attempt.await_end(victim, 15.0)
    signal_all(pids, signal.SIGCONT)


@attack()
async def supervisor_stopped(attempt: Attempt) -> None:
    """The supervisor of a node stands still (SIGSTOP), and goes on beside a newer generation."""
    job = await attempt.run(times={"fence_after": "6s"})
    victim = job.hosts()[-1]
    pids = victim.signal_kind("supervisor", signal.SIGSTOP)
    await attempt.await_newer(victim)
    await attempt.await_end(victim, 15.0)
    signal_all(pids, signal.SIGCONT)


@attack()
async def sshd_stopped(attempt: Attempt) -> None:
    """Every sshd of a node stands still: TCP answers and SSH does not.

    They go on beside a newer generation.
    """
    job = await attempt.run(times={"fence_after": "6s"})
    victim = job.hosts()[-1]
    victim.signal(signal.SIGSTOP)
    await attempt.sleep(0.0, 3.0)
    job.fail(0)
    await attempt.await_newer()
    victim.signal(signal.SIGCONT)
    await attempt.await_end(victim, 15.0)


# --- a node that fails in the middle of a stop


@attack()
async def rebooted_in_stop(attempt: Attempt) -> None:
    """A node reboots while its ranks, which ignore SIGTERM, are being stopped."""
    job = await attempt.run(times={"stop_grace": "4s"}, rank=["--stubborn"])
    victim = job.hosts()[-1]
    job.fail(0)
    await attempt.sleep(0.5, 3.0)
    attempt.world.places.reboot(victim.name)
    await attempt.await_newer()


@attack()
async def sshd_killed_in_stop(attempt: Attempt) -> None:
    """A node's sshd dies while its ranks, which ignore SIGTERM, are being stopped."""
    job = await attempt.run(times={"stop_grace": "4s"}, rank=["--stubborn"])
    victim = job.hosts()[-1]
    job.fail(0)
    await attempt.sleep(0.5, 3.0)
    victim.kill()
    await attempt.sleep(1.0, 4.0)
    victim.start()
    await attempt.await_newer()


# --- processes that ranks leave behind


@attack(obstacle=find_no_compiler, can_share=False, user="train")
async def stray_of_root(attempt: Attempt) -> None:
    """A rank has started, by sudo, a process of root in another session; another rank fails."""
    await _leave_stray(attempt, "root")


@attack(obstacle=find_no_compiler, can_share=False, user="train")
async def root_in_group(attempt: Attempt) -> None:
    """A rank has started, by sudo, a process of root in its own group; another rank fails."""
    await _leave_stray(attempt, "root-group")


@attack()
async def stray(attempt: Attempt) -> None:
    """A rank has left a process in another session, which ignores SIGTERM; another rank fails."""
    await _leave_stray(attempt, "session")


@attack()
async def stray_without_environment(attempt: Attempt) -> None:
    """As `stray`, with an empty environment; and the node's shim is killed."""
    await _leave_stray(attempt, "clean")


@attack()
async def wrapped_rank(attempt: Attempt) -> None:
    """A rank runs under a shell.

    Its node is cut off, its shim and supervisor are killed at once.
    """
    await _leave_stray(attempt, "shell")


async def _leave_stray(attempt: Attempt, kind: str) -> None:
    world = attempt.world
    name = f"j{uuid.uuid4().hex[:8]}"
    folder = world.folder / "jobs" / name
    words = [PYTHON, "-S", str(STRAY_PROGRAM), kind, str(world.folder / "sudo"), str(folder)]
    if kind.startswith("root"):
        _compile_sudo(world.folder)
    job = await attempt.run(name=name, command=words)
    victim = job.hosts()[-1]
    if kind == "clean":
        victim.signal_kind("shim", signal.SIGKILL)
    elif kind == "shell":
        world.network.isolate(victim.name)
        pids = [*victim.find("shim"), *victim.find("supervisor")]
        signal_all(pids, signal.SIGSTOP)
        signal_all(pids, signal.SIGKILL)
    else:
        job.fail(0)
    await attempt.await_newer(patience=40.0, after=4.0)


def _compile_sudo(folder: Path) -> None:
    """Make a program that executes its arguments as root, for every caller."""
    source = folder / "sudo.c"
    source.write_text(
        "#include <unistd.h>\n"
        "int main(int argc, char **argv) {\n"
        "    if (argc < 2 || setgid(0) || setuid(0)) return 1;\n"
        "    return execv(argv[1], argv + 1);\n"
        "}\n"
    )
    subprocess.run(["gcc", "-o", str(folder / "sudo"), str(source)], check=True)
    (folder / "sudo").chmod(0o4755)
