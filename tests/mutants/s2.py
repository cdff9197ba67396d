"""Changes that take out the rows of GPUTasker (docs/testing.md)."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        row="S2.1",
        what="a node reached by SSH that has no agent yet is not sent one",
        file="relaunch/backends/ssh/bootstrap.py",
        old="""        if not is_whole(path, sha256):
            say({"want": size})
""",
        new="""        if is_whole(path, sha256):
            say({"want": size})
""",
        tests=(
            "tests/backends/test_ssh.py::test_s2_1_ranks_start_on_a_node_with_only_sshd_and_python",
            "tests/e2e/test_ssh.py::test_s2_1_a_job_over_ssh_on_two_nodes_survives_a_lost_rank",
            "tests/e2e/test_ssh.py::test_s2_1_far_away_nodes_are_launched_watched_and_relaunched",
        ),
    ),
    Mutant(
        row="S2.1",
        what="each order to a node logs in again",
        file="relaunch/backends/session.py",
        old="""            if self._link is not None and self._link.alive:
                return self._link
            pipe = await self._connect()
""",
        new="""            pipe = await self._connect()
""",
        tests=(
            "tests/backends/test_ssh.py::test_s2_1_ranks_start_on_a_node_with_only_sshd_and_python",
            "tests/e2e/test_ssh.py::test_s2_1_a_job_over_ssh_on_two_nodes_survives_a_lost_rank",
        ),
    ),
    Mutant(
        row="S2.2",
        what="a start that comes again is answered as if it had started the ranks",
        file="relaunch/agent/ranks/orders.py",
        old="""            "pids": {rank: pid for rank, (pid, _) in launch["pids"].items()},
            "already": True,
""",
        new="""            "pids": {rank: pid for rank, (pid, _) in launch["pids"].items()},
            "already": False,
""",
        tests=(
            "tests/agent/test_orders.py::test_s2_2_a_start_that_comes_again_starts_no_rank_again",
        ),
    ),
    Mutant(
        row="S2.2",
        what="a grant that comes again to a running job launches it again",
        file="relaunch/job/decide.py",
        old="""            return Wait(
                Phase.LAUNCHING,
                f"there are nodes: {join_names((slot.node for slot in event.slots), NAMED)}",
                next="ranks are started",
            )
""",
        new="""            return Relaunch(
                job.generation + 1,
                f"there are nodes: {join_names((slot.node for slot in event.slots), NAMED)}",
            )
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_2_a_start_is_numbered_before_its_only_order",
        ),
    ),
    Mutant(
        row="S2.2",
        what="a node that has seen this very start gets it again, under another number",
        file="relaunch/job/diagnose.py",
        old="""        if one.highest and one.highest > (job.submission, job.generation)
""",
        new="""        if one.highest and one.highest >= (job.submission, job.generation)
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_2_a_node_that_has_seen_a_start_does_not_get_it_again",
        ),
    ),
    Mutant(
        row="S2.2",
        what="a launch one of whose answers is lost is given up for another, not repeated",
        file="activities/launch.py",
        old="""LAUNCH_ATTEMPTS = 3
""",
        new="""LAUNCH_ATTEMPTS = 1
""",
        tests=(
            "tests/workflows/test_job.py::test_s2_2_doubled_and_lost_messages_never_launch_twice",
        ),
    ),
    Mutant(
        row="S2.3",
        what="what has failed is started again",
        file="relaunch/spec/presets/gputasker.toml",
        old="""strategy = "FAIL"
""",
        new="""strategy = "RESTART_IN_PLACE"
spends = false
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py::test_s2_3_0_is_done_and_anything_else_has_failed",
            "tests/e2e/test_presets.py::test_s2_3_gputasker_starts_nothing_twice",
        ),
    ),
    Mutant(
        row="S2.3",
        what="a job whose ranks all exited with 0 has failed",
        file="relaunch/job/decide.py",
        old="""                Phase.SUCCEEDED,
                f"all ranks of generation {job.generation} exited with 0",
""",
        new="""                Phase.FAILED,
                f"all ranks of generation {job.generation} exited with 0",
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_3_0_is_done_and_anything_else_has_failed[0 is done]",
        ),
    ),
    Mutant(
        row="S2.4",
        what="the shim, and with it its ranks, dies with the session that started it",
        file="relaunch/agent/ranks/shim.py",
        old="""    if os.getsid(0) != os.getpid():
        os.setsid()
""",
        new="""    processes.die_with(os.getppid())
""",
        tests=(
            "tests/backends/test_ssh_lost.py"
            "::test_s2_4_a_killed_sshd_ends_no_rank_and_the_watch_resumes",
            "tests/backends/test_ssh_lost.py"
            "::test_s2_4_connections_that_are_cut_at_the_node_end_no_rank",
            "tests/backends/test_ssh_lost.py"
            "::test_s2_4_a_master_that_dies_leaves_the_ranks_to_the_next",
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_ranks_and_counts_outlive_a_killed_worker",
            "tests/e2e/test_ssh.py::test_s2_4_an_sshd_that_dies_under_a_job_stops_nothing",
            "tests/e2e/test_ssh.py::test_s2_4_a_killed_worker_leaves_the_ranks_to_the_next",
        ),
    ),
    Mutant(
        row="S2.4",
        what="a watch whose connection breaks ends like one that has no more to report",
        file="relaunch/backends/session.py",
        old="""\
            message = await self._link.receive(self._inbox, max(0.0, within), "watch")
""",
        new="""            try:
                message = await self._link.receive(self._inbox, max(0.0, within), "watch")
            except Unreachable:
                return
""",
        tests=(
            "tests/backends/test_ssh_lost.py"
            "::test_s2_4_a_killed_sshd_ends_no_rank_and_the_watch_resumes",
            "tests/backends/test_ssh_lost.py"
            "::test_s2_4_connections_that_are_cut_at_the_node_end_no_rank",
            "tests/backends/test_ssh_network.py"
            "::test_s2_4_a_network_that_loses_everything_is_read_as_that",
            "tests/backends/test_ssh_network.py"
            "::test_s2_4_a_node_whose_answers_get_lost_is_only_unreachable",
        ),
    ),
    Mutant(
        row="S2.4",
        what="a node whose lease has run out stops its ranks, though its peers vouch for it",
        file="relaunch/agent/ranks/lease.py",
        old="""        until = asked + self.fence_after
""",
        new="""        until = self.leased_until
""",
        tests=(
            "tests/backends/test_ssh_network.py"
            "::test_s2_4_peers_meet_on_the_training_network_in_a_cut",
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_ranks_and_counts_outlive_a_killed_worker",
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_a_server_away_beyond_the_lease_costs_nothing",
            "tests/e2e/test_ssh.py::test_s2_7_s2_8_a_node_only_the_controller_lost_trains_on",
        ),
    ),
    Mutant(
        row="S2.4",
        what="a watch that takes over from one of a dead master counts the ranks as gone",
        file="activities/watch.py",
        old="""        gang = WatchedShard(input, pace, before)
""",
        new="""        gang = WatchedShard(input, pace, before)
        if info.attempt > 1:
            for node in input.nodes:
                gone = RanksVanished(node, datetime.now(UTC), "the watch of its ranks broke")
                gang.add_observation(node, gone)
""",
        tests=(
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_ranks_and_counts_outlive_a_killed_worker",
            "tests/e2e/test_ssh.py::test_s2_4_a_killed_worker_leaves_the_ranks_to_the_next",
            "tests/e2e/test_ssh.py::test_s2_4_another_machine_takes_over_from_a_dead_controller",
            "tests/e2e/test_ssh.py::test_s2_4_a_worker_waking_after_a_takeover_changes_nothing",
        ),
    ),
    Mutant(
        row="S2.4",
        what="the ranks of a node that cannot be reached count as gone",
        file="activities/watch.py",
        old="""        except Unreachable as error:
            reason = error.reason
        gang""",
        new="""        except Unreachable as error:
            gang.add_observation(node, RanksVanished(node, datetime.now(UTC), error.reason))
            return
        gang""",
        tests=(
            "tests/workflows/test_lost_nodes.py"
            "::test_s2_8_a_lost_node_that_returns_goes_on_undisturbed",
            "tests/workflows/test_lost_nodes.py"
            "::test_s2_8_a_node_may_be_lost_and_return_many_times",
            "tests/e2e/test_ssh.py::test_s2_4_an_sshd_that_dies_under_a_job_stops_nothing",
            "tests/e2e/test_ssh.py::test_s2_7_s2_8_a_node_only_the_controller_lost_trains_on",
            "tests/e2e/test_controller_away.py"
            "::test_s2_7_s2_8_a_lost_node_goes_on_when_it_is_heard_again",
        ),
    ),
    Mutant(
        row="S2.5",
        what="a rank is not recorded before its command starts",
        file="relaunch/agent/ranks/spawn.py",
        old="""        _record_task(generation, record, processes.identify_self())
        reach""",
        new="""        reach""",
        tests=(
            "tests/agent/test_tasks.py::test_s2_5_a_task_is_recorded_before_its_command_starts",
        ),
    ),
    Mutant(
        row="S2.5",
        what="the record of a rank does not say of which boot it is",
        file="relaunch/agent/ranks/spawn.py",
        old="""        "node": order["node"],
        "boot_id": read_boot_id(generation.state),
    }
""",
        new="""        "node": order["node"],
    }
""",
        tests=(
            "tests/agent/test_tasks.py::test_s2_5_a_task_is_recorded_before_its_command_starts",
            "tests/agent/test_tasks.py::test_s2_5_a_record_that_a_boot_left_says_of_which_boot",
        ),
    ),
    Mutant(
        row="S2.5",
        what="the records of ranks that have ended are not removed",
        file="relaunch/agent/state.py",
        old="""                path.unlink(missing_ok=True)
        except OSError as error:  # the boot and the start time in a record say that it is old
""",
        new="""                path.exists()
        except OSError as error:  # the boot and the start time in a record say that it is old
""",
        tests=(
            "tests/agent/test_tasks.py::test_s2_5_a_task_killed_before_its_command_leaves_none",
            "tests/agent/test_tasks.py::test_s2_5_the_record_of_a_task_is_removed_at_its_exit",
            "tests/agent/test_tasks.py::test_s2_5_only_the_record_of_the_task_that_ended_goes",
            "tests/agent/test_tasks.py::test_s2_5_the_records_of_a_killed_shim_go_with_its_tasks",
            "tests/agent/test_tasks.py::test_s2_5_a_record_that_a_boot_left_says_of_which_boot",
            "tests/agent/test_tasks.py::test_s2_5_a_task_that_cannot_be_started_leaves_no_record",
        ),
    ),
    Mutant(
        row="S2.5",
        what="the record of a shim has no boot id, and its pid is believed in any boot",
        file="relaunch/agent/state.py",
        old="""        if record is None or record["boot_id"] != read_boot_id(self.state):
            return None
        return record["pid"], record["started"]

    def write_identity(self, of: str, pid: int, started: int) -> None:
        record = {"pid": pid, "started": started, "boot_id": read_boot_id(self.state)}
""",
        new="""        if record is None:
            return None
        return record["pid"], record["started"]

    def write_identity(self, of: str, pid: int, started: int) -> None:
        record = {"pid": pid, "started": started}
""",
        tests=(
            "tests/backends/test_ssh_lost.py::test_s2_5_the_state_on_the_node_carries_its_boot",
            "tests/e2e/test_controller_away.py"
            "::test_s2_5_records_of_running_ranks_name_pids_and_boot",
        ),
    ),
    Mutant(
        row="S2.6",
        what="whose word a line of a watch is, is not checked",
        file="relaunch/backends/answers.py",
        old="""        if not self._is_platform and isinstance(line, dict):
            self._check_sender(line)
""",
        new="""""",
        tests=(
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_what_another_says_is_no_progress_and_no_end[generation-observation]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_what_another_says_is_no_progress_and_no_end[node-end]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_what_another_says_is_no_progress_and_no_end[shim-end]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_what_another_says_is_no_progress_and_no_end[no sender-observation]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_a_watch_that_another_answers_does_not_begin",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_nothing_counts_before_a_hello_or_against_it[observation]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_nothing_counts_before_a_hello_or_against_it[end]",
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_nothing_counts_before_a_hello_or_against_it[refusal after a hello]",
            "tests/backends/test_ecs_agent.py"
            "::test_s2_6_an_agent_of_another_container_is_not_believed[heartbeat]",
        ),
    ),
    Mutant(
        row="S2.6",
        what="an agent of an earlier release, which names no sender, is not believed",
        file="relaunch/backends/answers.py",
        old="""        elif self._names_sender and kind is not None:
""",
        new="""        elif kind is not None:
""",
        tests=(
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_the_word_of_an_earlier_agent_counts_by_its_hello",
        ),
    ),
    Mutant(
        row="S2.6",
        what="a supervisor does not say whose word its lines are",
        file="relaunch/agent/ranks/supervisor.py",
        old="""\
        watcher.channel.send({**said, "sender": make_sender(self.token, self.node, shim)})
""",
        new="""        watcher.channel.send(said)
""",
        tests=("tests/agent/test_watch.py::test_s2_6_each_line_of_a_watch_names_its_sender",),
    ),
    Mutant(
        row="S2.6",
        what="an exit is dated by the clock of the node that reports it",
        file="activities/observations.py",
        old="""            signal=raw.get("signal"),
            at=received_at,
""",
        new="""            signal=raw.get("signal"),
            at=datetime.fromtimestamp(float(raw["at"]), received_at.tzinfo)
            if "at" in raw
            else received_at,
""",
        tests=(
            "tests/activities/test_hostile_nodes.py"
            "::test_s2_6_what_nodes_say_is_dated_by_the_receivers_clock",
        ),
    ),
    Mutant(
        row="S2.6",
        what="silences are measured by the wall clock, which is stepped",
        file="activities/clocks.py",
        old="""    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
""",
        new="""    return read_wall_clock().timestamp()
""",
        tests=(
            "tests/activities/test_stopping.py"
            "::test_s2_6_a_step_of_the_wall_clock_makes_no_silence_longer",
        ),
    ),
    Mutant(
        row="S2.6",
        what="a watch is broken only when thirty heartbeats are missing",
        file="relaunch/backends/session.py",
        old="""SILENT_BEATS = 3
""",
        new="""SILENT_BEATS = 30
""",
        tests=(
            "tests/backends/test_ssh_lost.py"
            "::test_s2_6_a_frozen_sshd_is_noticed_by_missing_heartbeats",
            "tests/backends/test_ssh_network.py"
            "::test_s2_4_a_network_that_loses_everything_is_read_as_that",
        ),
    ),
    Mutant(
        row="S2.7",
        what="a job of which a node is lost has failed",
        file="relaunch/job/decide.py",
        old="""    reason = f"{explain_unreachable(event)}; nothing is stopped"
    return Wait(Phase.NODE_LOST, reason, next=_explain_lost_next(job), until=until)
""",
        new="""    reason = f"{explain_unreachable(event)}; nothing waits for it until {until}"
    return Stop(Phase.FAILED, reason, exit_code=1)
""",
        tests=(
            "tests/recovery/test_decide.py"
            "::test_s2_7_an_unreachable_node_is_no_failure_and_no_stop",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_7_a_lost_node_is_no_failure_and_nothing_is_stopped",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_fault_that_awaited_a_lost_node_is_one_incident",
            "tests/e2e/test_controller_away.py"
            "::test_s2_7_s2_8_a_lost_node_goes_on_when_it_is_heard_again",
            "tests/e2e/test_controller_away.py::test_s2_7_a_job_asks_while_its_only_node_is_lost",
            "tests/e2e/test_presets.py::test_s2_8_gputasker_keeps_the_ranks_of_a_lost_node",
            "tests/e2e/test_ssh.py::test_s2_7_s2_8_a_node_only_the_controller_lost_trains_on",
        ),
    ),
    Mutant(
        row="S2.7",
        what="a node is lost after 60 seconds",
        file="relaunch/spec/presets/gputasker.toml",
        old="""timeouts = { lost_after = "180s" }
""",
        new="""timeouts = { lost_after = "60s" }
""",
        tests=("tests/recovery/test_s2_gputasker.py::test_s2_7_a_node_is_lost_after_180_seconds",),
    ),
    Mutant(
        row="S2.7",
        what="a lost node is waited for without a deadline, and no person is asked",
        file="relaunch/job/decide.py",
        old="""    until = None if _finds_hang(job) else _find_lost_deadline(job, now, rules)
    reason""",
        new="""    until = None
    reason""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_7_a_lost_node_is_not_waited_for_without_a_deadline",
            "tests/e2e/test_controller_away.py::test_s2_7_a_job_asks_while_its_only_node_is_lost",
        ),
    ),
    Mutant(
        row="S2.7",
        what="a node that was never heard is lost as well",
        file="relaunch/job/apply.py",
        old="""\
    silent = (node for node in event.unreachable if node in job.maybe_alive and node not in known)
""",
        new="""    silent = (node for node in event.unreachable if node not in known)
""",
        tests=(
            "tests/recovery/test_decide.py::test_s2_7_a_node_that_never_ran_the_job_is_not_lost",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a job is launched again when its lost node is heard again",
        file="relaunch/job/decide.py",
        old="""\
            return _running(job, f"{event.node} answers again and its ranks had gone on", now)
""",
        new="""            return Relaunch(job.generation + 1, f"{event.node} answers again")
""",
        tests=(
            "tests/recovery/test_decide.py"
            "::test_s2_8_a_node_that_comes_back_goes_on_and_spends_nothing",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_node_that_comes_back_goes_on_and_costs_nothing",
            "tests/workflows/test_lost_nodes.py"
            "::test_s2_8_a_lost_node_that_returns_goes_on_undisturbed",
            "tests/workflows/test_lost_nodes.py"
            "::test_s2_8_a_node_may_be_lost_and_return_many_times",
            "tests/e2e/test_controller_away.py"
            "::test_s2_7_s2_8_a_lost_node_goes_on_when_it_is_heard_again",
            "tests/e2e/test_presets.py::test_s2_8_gputasker_keeps_the_ranks_of_a_lost_node",
            "tests/e2e/test_ssh.py::test_s2_7_s2_8_a_node_only_the_controller_lost_trains_on",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a lost node counts as empty at once, its GPUs are not kept",
        file="relaunch/job/apply.py",
        old="""\
    return open_incident(replace(job, lost=lost), diagnosis, now - event.unheard_for, now)
""",
        new="""    alive = tuple(node for node in job.maybe_alive if node != event.node)
    job = replace(job, lost=lost, maybe_alive=alive)
    return open_incident(job, diagnosis, now - event.unheard_for, now)
""",
        tests=(
            "tests/recovery/test_decide.py"
            "::test_s2_7_an_unreachable_node_is_no_failure_and_no_stop",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_7_a_lost_node_is_no_failure_and_nothing_is_stopped",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_lost_nodes_gpus_are_kept_until_its_ranks_end",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a fault that came while a node was lost is forgotten when it returns",
        file="relaunch/job/apply.py",
        old="""        job = replace(job, deferred_fault=own)
    return open_incident(job, diagnosis, opened, now)
""",
        new="""        job = replace(job, deferred_fault=None)
    return open_incident(job, diagnosis, opened, now)
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_rank_that_failed_on_a_lost_node_counts_on_return",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_fault_that_awaited_a_lost_node_is_one_incident",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a late heartbeat revives a job that is ending",
        file="relaunch/job/decide.py",
        old="""    if job.ending is not None:
        return _while_ending(job, event)
""",
        new="""    if job.ending is not None and not isinstance(event, NodeReturned):
        return _while_ending(job, event)
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_late_heartbeat_revives_nothing_that_has_ended",
        ),
    ),
    Mutant(
        row="S2.8",
        what="ranks are launched elsewhere before a lost node must have stopped its own",
        file="relaunch/job/fencing.py",
        old="""        last = max(since, *leased, *stopped)
        safe_at = max(safe_at, last + fence_wait(one, one.size).total_seconds())
""",
        new="""        safe_at = max(since, *stopped) if leased else safe_at
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_lost_nodes_gpus_are_kept_until_its_ranks_end",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a node that is cut off from everybody never stops its own ranks",
        file="relaunch/agent/ranks/lease.py",
        old="""        return self.alive_until if self.fences or not self.renewed else None
""",
        new="""        return self.alive_until if not self.renewed else None
""",
        tests=(
            "tests/e2e/test_ssh.py::test_s2_8_a_node_lost_to_all_is_replaced_once_ranks_are_gone",
            "tests/e2e/test_warm_ssh.py::test_s2_8_ranks_are_forked_in_place_and_on_a_spare",
        ),
    ),
    Mutant(
        row="S2.8",
        what="a gang that stands still waits for its lost node for ever, fence or not",
        file="relaunch/job/fencing.py",
        old="""    return fences(job) and bool(gangs) and all(gang - lost for gang in gangs)
""",
        new="""    return not lost and fences(job) and bool(gangs)
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_lost_nodes_gpus_are_kept_until_its_ranks_end",
            "tests/e2e/test_ssh.py::test_s2_8_a_node_lost_to_all_is_replaced_once_ranks_are_gone",
        ),
    ),
    Mutant(
        row="S2.9",
        what="a cancel is ignored",
        file="relaunch/job/decide.py",
        old="""        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
                Phase.CANCELLED,
                f"cancelled{who}" + (f": {event.reason}" if event.reason else ""),
                exit_code=CANCELLED_EXIT_CODE,
            )
        case Answered() if event.node:
""",
        new="""        case CancelRequested():
            return Ignore("no person ends a job")
        case Answered() if event.node:
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_9_what_an_operator_may_do_about_a_lost_node[cancel ends it]",
        ),
    ),
    Mutant(
        row="S2.9",
        what="a job that is cancelled ends and leaves its ranks where they are",
        file="workflows/training_job/actions.py",
        old="""        job = self._job
        generation, alive = job.generation, job.maybe_alive
""",
        new="""        job = self._job
        if job.ending is not None and job.ending.phase.name == "CANCELLED":
            return
        generation, alive = job.generation, job.maybe_alive
""",
        tests=("tests/e2e/test_ranks.py::test_s2_9_a_cancel_ends_ranks_with_all_that_they_began",),
    ),
    Mutant(
        row="S2.9",
        what="a retry launches on the lost node as well",
        file="relaunch/job/decide.py",
        old="""        avoid=event.avoid_nodes,
        without=job.lost_names,
""",
        new="""        avoid=event.avoid_nodes,
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_9_what_an_operator_may_do_about_a_lost_node[retry starts it elsewhere]",
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_8_a_lost_nodes_gpus_are_kept_until_its_ranks_end",
        ),
    ),
    Mutant(
        row="S2.9",
        what="ranks on a node that a person declared dead still count as alive",
        file="relaunch/job/launches.py",
        old="""        maybe_alive=tuple(other for other in job.maybe_alive if other != node),
        lost=tuple(lost for lost in job.lost if lost.node != node),
        launched=_living(launched),
""",
        new="""        maybe_alive=job.maybe_alive,
        lost=job.lost,
        launched=_living(launched),
""",
        tests=(
            "tests/recovery/test_s2_gputasker.py"
            "::test_s2_9_a_dead_node_holds_no_ranks_and_a_retry_may_follow",
        ),
    ),
    Mutant(
        row="S2.9",
        what="a lost job that no person answers about ends by itself",
        file="relaunch/job/decide.py",
        old="""        case Phase.WAITING_FOR_PERSON if job.lost:
            return Ask(
                f"{_describe_lost(job, 'still does not answer')}, and no person has answered",
                question=f"`nodes declare-dead` it, or {ANSWERS}?",
                without=_find_named(job),
                ladder=_find_ladder(job) if Rule.SAME_QUESTION in rules else None,
                reminders=job.reminders + 1,
            )
""",
        new="""        case Phase.WAITING_FOR_PERSON if job.lost:
            return Stop(
                Phase.FAILED,
                f"{_describe_lost(job, 'still does not answer')}, and no person has answered",
                exit_code=1,
            )
""",
        tests=("tests/recovery/test_s2_gputasker.py::test_s2_9_only_a_person_ends_a_lost_job",),
    ),
    Mutant(
        row="S2.10",
        what="jobs get GPUs that strangers use",
        file="relaunch/pool/placement.py",
        old="""\
        return tuple(gpu for gpu in self.unclaimed_gpus(job) if gpu not in self.foreign_gpus)
""",
        new="""        return self.unclaimed_gpus(job)
""",
        tests=(
            "tests/recovery/test_inventory.py::test_s2_10_a_job_gets_gpus_that_no_stranger_uses",
            "tests/recovery/test_inventory.py"
            "::test_s2_10_a_whole_node_job_waits_and_names_the_stranger",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s2_10_jobs_get_gpus_free_of_strangers_or_name_them",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s2_10_a_job_runs_when_the_stranger_it_waits_for_left",
        ),
    ),
    Mutant(
        row="S2.10",
        what="the processes of strangers that a node reports are not read",
        file="relaunch/pool/inventory.py",
        old="""        and one.get("ours") is False
""",
        new="""        and one.get("ours") is None
""",
        tests=(
            "tests/activities/test_fleet.py"
            "::test_s2_10_gpus_are_read_with_a_look_where_that_is_wanted",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s2_10_jobs_get_gpus_free_of_strangers_or_name_them",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s2_10_a_job_runs_when_the_stranger_it_waits_for_left",
        ),
    ),
    Mutant(
        row="S2.10",
        what="a GPU that is lost counts as one that answers",
        file="relaunch/pool/inventory.py",
        old="""            lost.append(_bus(row, index))
            continue
""",
        new="""            continue
""",
        tests=(
            "tests/activities/test_fleet.py"
            "::test_s2_10_gpus_are_read_with_a_look_where_that_is_wanted",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s2_10_a_node_with_a_lost_gpu_is_repaired_before_a_job",
        ),
    ),
    Mutant(
        row="S2.10",
        what="a node takes the processes of strangers on its GPUs for relaunch's own",
        file="relaunch/agent/node/gpu_users.py",
        old="""            if pid in own
            else""",
        new="""            if pid in pids
            else""",
        tests=(
            "tests/agent/test_gpu_users.py"
            "::test_s2_10_a_stranger_is_reported_by_name_without_arguments",
            "tests/backends/test_health_contract.py"
            "::test_s2_10_a_look_has_gpus_and_strangers_where_asked_to",
        ),
    ),
    Mutant(
        row="S2.10",
        what="a node reads its GPUs at each look, asked to or not",
        file="relaunch/agent/reports.py",
        old="""        not order.flag("gpus", False)
        or holder is not None
""",
        new="""        holder is not None
""",
        tests=(
            "tests/agent/test_gpu_users.py::test_s2_10_a_look_reports_gpus_only_when_asked_to",
            "tests/backends/test_health_contract.py"
            "::test_s2_10_a_look_has_gpus_and_strangers_where_asked_to",
        ),
    ),
    Mutant(
        row="S2.10",
        what="strangers on GPUs are not shown in the list of nodes",
        file="relaunch/cli/gpu_views.py",
        old="""\
    return [part for part in (*told, describe_uses(record.foreign_processes)) if part]
""",
        new="""    return [part for part in told if part]
""",
        tests=(
            "tests/console/test_fleet_views.py"
            "::test_s2_10_nodes_list_shows_gpus_as_read_and_their_strangers",
        ),
    ),
    Mutant(
        row="S2.10",
        what="a node is shown without who uses its GPUs",
        file="relaunch/cli/gpu_views.py",
        old="""                *(use.who for use in found.used if index in use.gpus),
""",
        new="""""",
        tests=(
            "tests/console/test_fleet_views.py"
            "::test_s2_10_a_node_is_shown_with_gpus_memory_and_their_users",
        ),
    ),
    Mutant(
        row="S2.11",
        what="the settings file outranks the environment",
        file="relaunch/config.py",
        old="""    values = {**written, **in_environment, **typed}
""",
        new="""    values = {**in_environment, **written, **typed}
""",
        tests=(
            "tests/console/test_settings.py::test_s2_11_settings_rank_options_environment_file",
        ),
    ),
    Mutant(
        row="S2.11",
        what="variables of the environment are not read",
        file="relaunch/config.py",
        old="""\
        known[variable]: value for variable, value in exported.items() if variable in known
""",
        new="""        known[variable]: value for variable, value in exported.items() if not known
""",
        tests=(
            "tests/console/test_settings.py::test_s2_11_settings_rank_options_environment_file",
        ),
    ),
)
