"""Changes that take out the rows of TorchElastic (docs/testing.md)."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    # --- S3.1: one agent per node starts nproc_per_node ranks and watches them
    Mutant(
        row="S3.1",
        what="the agent starts only the first of a node's ranks",
        file="relaunch/agent/ranks/spawn.py",
        old="""enumerate(zip(ranks, environments)):""",
        new="""enumerate(zip(ranks[:1], environments)):""",
        tests=(
            "tests/agent/test_watch.py::test_s3_1_an_agent_starts_ranks_and_watches_each_of_them",
        ),
    ),
    Mutant(
        row="S3.1",
        what="the agent notices only the end of a node's first rank",
        file="relaunch/agent/ranks/shim.py",
        old="""                and pid in numbers
""",
        new="""                and numbers.get(pid) == self.order["ranks"][0]
""",
        tests=(
            "tests/agent/test_watch.py::test_s3_1_an_agent_starts_ranks_and_watches_each_of_them",
        ),
    ),
    Mutant(
        row="S3.1",
        what="a launcher starts one rank on each node, whatever nproc_per_node is",
        file="relaunch/job/launchers.py",
        old="""f"--nproc-per-node={spec.nproc_per_node}",""",
        new="""f"--nproc-per-node={min(1, spec.nproc_per_node)}",""",
        tests=(
            "tests/agent/test_launched.py::"
            "test_s3_1_launched_ranks_have_own_files_and_know_the_launch",
        ),
    ),
    Mutant(
        row="S3.1",
        what="ranks below a launcher have no progress file of their own",
        file="relaunch/agent/ranks/launched.py",
        old="""    env["RELAUNCH_PROGRESS_FILE"] = str(generation.progress_path(rank))
""",
        new="",
        tests=(
            "tests/agent/test_launched.py::"
            "test_s3_1_launched_ranks_have_own_files_and_know_the_launch",
        ),
    ),
    # --- S3.2: one rank fails: all restart, up to max_restarts, then the job fails
    Mutant(
        row="S3.2",
        what="max_restarts limits nothing",
        file="relaunch/job/ladder.py",
        old="""if rung.spends and job.restarts_spent >= job.policy.max_restarts:""",
        new="""if rung.spends and job.policy.max_restarts < 0:""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_all_ranks_restart_until_max_restarts_then_it_fails",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_one_count_for_all_causes_survives_progress",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_max_restarts_is_the_number_of_restarts",
            "tests/workflows/test_job.py::"
            "test_s3_2_a_spent_budget_fails_a_job_with_the_rank_exit_code",
            "tests/e2e/test_presets.py::"
            "test_s3_2_torchelastic_restarts_all_ranks_up_to_max_restarts",
        ),
    ),
    Mutant(
        row="S3.2",
        what="restarts are not counted",
        file="relaunch/job/apply.py",
        old="""restarts_spent=job.restarts_spent + take.spent""",
        new="""restarts_spent=job.restarts_spent""",
        tests=(
            "tests/recovery/test_decide.py::"
            "test_s3_2_a_failed_rank_spends_a_try_before_all_restart",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_all_ranks_restart_until_max_restarts_then_it_fails",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_one_count_for_all_causes_survives_progress",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_2_max_restarts_is_the_number_of_restarts",
            "tests/workflows/test_job.py::"
            "test_s3_2_one_failed_rank_restarts_all_ranks_on_all_nodes",
        ),
    ),
    Mutant(
        row="S3.2",
        what="the tries of a rung have no limit, so no ladder ends the job",
        file="relaunch/job/ladder.py",
        old="""        if rung.tries is not None and used >= rung.tries:
            continue
""",
        new="""        if rung.tries is not None and used < 0:
            continue
""",
        tests=(
            "tests/recovery/test_decide.py::"
            "test_s3_2_the_ladder_ends_and_the_job_fails_with_its_code",
        ),
    ),
    Mutant(
        row="S3.2",
        what="after a fault, ranks are started again on the first node only",
        file="activities/launch.py",
        old="""input.slots],
            lambda node: backend.start(""",
        new="""input.slots][: 1 if input.token.generation > 1 else None],
            lambda node: backend.start(""",
        tests=(
            "tests/workflows/test_job.py::"
            "test_s3_2_one_failed_rank_restarts_all_ranks_on_all_nodes",
        ),
    ),
    # --- S3.3: a change of membership restarts all, and is no retry; nodes: {min, max}
    Mutant(
        row="S3.3",
        what="every launch for a fault counts as a retry, a change of membership too",
        file="relaunch/job/apply.py",
        old="""restarts_spent=job.restarts_spent + take.spent""",
        new="""restarts_spent=job.restarts_spent + 1""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_3_a_membership_change_restarts_all_and_is_no_retry",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_3_and_it_may_happen_when_nothing_is_left",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_job_with_enough_nodes_left_shrinks_for_free",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_lost_node_may_be_left_behind_without_another_one",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_loss_and_grows_on_the_return",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_the_rung_shrink_drops_the_suspect_and_adds_no_node",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job with a range of nodes never runs with fewer than its maximum",
        file="relaunch/spec/job.py",
        old="""return self.nodes if isinstance(self.nodes, int) else self.nodes.min
""",
        new="""return self.nodes if isinstance(self.nodes, int) else self.nodes.max
""",
        tests=(
            "tests/recovery/test_spec.py::test_s3_3_a_job_says_its_most_and_fewest_nodes",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_job_at_its_minimum_is_left_to_the_next_rung",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_job_with_enough_nodes_left_shrinks_for_free",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_lost_node_may_be_left_behind_without_another_one",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_loss_and_grows_on_the_return",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_drain_and_grows_on_the_release",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_begins_small_and_leaves_nodes_others_want",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_the_rung_shrink_drops_the_suspect_and_adds_no_node",
            "tests/workflows/test_elastic_jobs.py::test_s3_3_shares_of_nodes_shrink_and_grow_too",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_lone_rank_is_stopped_before_it_joins_a_gang",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_gone_or_to_an_older_claim_does_nothing",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_goes_back_when_a_fault_comes_first",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_worker_may_die_between_the_offer_and_the_launch",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_lost_fleet_offers_again_what_its_jobs_would_take",
        ),
    ),
    Mutant(
        row="S3.3",
        what="the fleet gives a job never more than its fewest nodes",
        file="relaunch/pool/messages.py",
        old="""return self.nodes if self.more_at is not None else max(self.nodes, self.most)""",
        new="""return self.nodes""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_gets_its_most_if_free_and_never_too_few",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_goes_on_without_a_lost_node_and_says_so",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_can_run_waits_for_no_breaker_or_restore",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_takes_the_offer_gets_just_those_nodes",
            "tests/recovery/test_offers.py::test_s3_3_a_node_that_is_back_is_offered",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_is_on_the_page_and_reserves_its_nodes",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_drain_and_grows_on_the_release",
        ),
    ),
    Mutant(
        row="S3.3",
        what="an offer restarts the ranks before the fleet has granted any node",
        file="relaunch/job/decide.py",
        old="""    return Wait(
        Phase.RUNNING,
        _describe_offer(job, event.nodes),
        next="the ranks run on; when the fleet has granted the nodes, all start again",
    )
""",
        new="""    reason = _describe_offer(job, event.nodes)
    return Relaunch(job.generation + 1, reason, strategy=Strategy.GROW)
""",
        tests=(
            "tests/recovery/test_elastic.py::"
            "test_s3_3_only_a_grant_not_an_offer_restarts_the_ranks",
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_generation_stays_between_its_minimum_and_maximum",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_gone_or_to_an_older_claim_does_nothing",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a node that joins is offered to no job",
        file="relaunch/pool/grants.py",
        old="""        and claim.most > len(claim.keep)
""",
        new="""        and claim.most < len(claim.keep)
""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_what_is_free_is_offered_once_the_job_has_run_long",
            "tests/recovery/test_offers.py::test_s3_3_a_node_that_is_back_is_offered",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_takes_the_offer_gets_just_those_nodes",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_is_on_the_page_and_reserves_its_nodes",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_worker_may_die_between_the_offer_and_the_launch",
        ),
    ),
    # --- S3.4: success only if every rank succeeds
    Mutant(
        row="S3.4",
        what="a job whose ranks have all exited with 0 has failed",
        file="relaunch/job/decide.py",
        old="""                Phase.SUCCEEDED,
                f"all ranks of generation {job.generation} exited with 0",
                exit_code=0,
""",
        new="""                Phase.FAILED,
                f"all ranks of generation {job.generation} exited with 0",
                exit_code=1,
""",
        tests=(
            "tests/recovery/test_decide.py::test_s3_4_when_every_rank_succeeds_so_does_the_job",
            "tests/recovery/test_s3_torchelastic.py::test_s3_4_success_is_that_of_every_rank",
            "tests/workflows/test_job.py::test_s3_4_an_exit_with_0_seen_by_an_earlier_watch_counts",
        ),
    ),
    Mutant(
        row="S3.4",
        what="a job succeeds although a rank failed, if another one has exited with 0",
        file="relaunch/job/decide.py",
        old="""        case FaultObserved() | RanksHung() | LaunchFailed() | LaunchRefused():
            assert diagnosis""",
        new="""        case FaultObserved() if any(
            getattr(one, "exit_code", None) == 0
            for one in (*event.observations, *event.finished)
        ):
            return Stop(Phase.SUCCEEDED, "a rank exited with 0", exit_code=0)
        case FaultObserved() | RanksHung() | LaunchFailed() | LaunchRefused():
            assert diagnosis""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::test_s3_4_success_is_that_of_every_rank",
            "tests/workflows/test_job.py::test_s3_4_success_only_when_every_rank_succeeds",
        ),
    ),
    Mutant(
        row="S3.4",
        what="a rank that exits with another code than 0 counts as a success",
        file="relaunch/evidence/observations.py",
        old="""        return self.exit_code != 0
""",
        new="""        return self.exit_code is None
""",
        tests=("tests/workflows/test_job.py::test_s3_4_success_only_when_every_rank_succeeds",),
    ),
    Mutant(
        row="S3.4",
        what="a node reports exits by its own numbers of the ranks",
        file="relaunch/agent/ranks/shim.py",
        old="""                "rank": rank,
                "local_rank": self.order["ranks"].index(rank),
""",
        new="""                "rank": self.order["ranks"].index(rank),
                "local_rank": self.order["ranks"].index(rank),
""",
        tests=("tests/agent/test_watch.py::test_s3_4_exits_are_reported_by_global_rank",),
    ),
    Mutant(
        row="S3.4",
        what="exits with 0 that an earlier watch has seen are forgotten",
        file="activities/gang.py",
        old="""            self._nodes[node].exited = dict.fromkeys(ranks, True)
""",
        new="""            self._nodes[node].exited = dict.fromkeys(ranks[:0], True)
""",
        tests=(
            "tests/workflows/test_job.py::test_s3_4_an_exit_with_0_seen_by_an_earlier_watch_counts",
        ),
    ),
    # --- S3.5: the exit barrier
    Mutant(
        row="S3.5",
        what="the preset torchelastic has an exit barrier of 30 s, not of 300 s",
        file="relaunch/spec/presets/torchelastic.toml",
        old='''exit_barrier = "300s"''',
        new='''exit_barrier = "30s"''',
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_5_past_the_exit_barrier_only_a_running_rank_hangs",
        ),
    ),
    Mutant(
        row="S3.5",
        what="there is no exit barrier: the last ranks may run for as long as they like",
        file="relaunch/job/hang.py",
        old="""    if finished is None or finished <= barrier:
        return None
""",
        new="""    if finished is None or finished <= 1000 * barrier:
        return None
""",
        tests=(
            "tests/activities/test_watch.py::"
            "test_s3_5_a_rank_that_stalls_after_another_finished_hangs",
            "tests/e2e/test_ranks.py::test_s3_5_a_rank_that_stalls_past_the_exit_barrier_is_hung",
        ),
    ),
    Mutant(
        row="S3.5",
        what="past the exit barrier a rank hangs although its training advances",
        file="relaunch/job/hang.py",
        old="""    if pace.advanced_at is not None and now - pace.advanced_at <= barrier:
        return None
""",
        new="",
        tests=(
            "tests/activities/test_watch.py::"
            "test_s3_5_ranks_advancing_past_the_exit_barrier_may_succeed",
        ),
    ),
    Mutant(
        row="S3.5",
        what="a rank that is not done when the first one is hangs at once",
        file="relaunch/job/hang.py",
        old="""    if finished is None or finished <= barrier:
        return None
""",
        new="""    if finished is None:
        return None
""",
        tests=(
            "tests/e2e/test_ranks.py::test_s3_5_ranks_that_end_within_the_exit_barrier_succeed",
        ),
    ),
    Mutant(
        row="S3.5",
        what="a hang names no rank, unless a stack accuses it",
        file="relaunch/job/diagnose.py",
        old="""ranks=tuple(one.rank for one in fault.suspects) or fault.ranks,""",
        new="""ranks=tuple(one.rank for one in fault.suspects),""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_5_past_the_exit_barrier_only_a_running_rank_hangs",
        ),
    ),
    # --- S3.6: the error with the smallest timestamp is the cause, with its traceback
    Mutant(
        row="S3.6",
        what="the error with the largest timestamp is the cause",
        file="relaunch/job/diagnose.py",
        old="""    when, at = min(
""",
        new="""    when, at = max(
""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_6_the_earliest_error_is_the_cause_with_its_traceback",
            "tests/recovery/test_diagnose.py::test_s3_6_root_cause_of_exits",
            "tests/recovery/test_diagnose.py::"
            "test_s3_6_errors_of_one_moment_must_agree_to_be_a_cause",
            "tests/recovery/test_diagnose.py::test_s3_6_a_clock_that_cannot_be_right_dates_nothing",
        ),
    ),
    Mutant(
        row="S3.6",
        what="timestamps of errors are ignored: the first exit to arrive is the cause",
        file="relaunch/job/diagnose.py",
        old="""    return one.error.timestamp if -AHEAD <= late <= BEHIND else None
""",
        new="""    return one.error.timestamp if late != late else None
""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_6_the_earliest_error_is_the_cause_with_its_traceback",
            "tests/recovery/test_evidence_order.py::"
            "test_s3_6_dated_errors_name_the_same_cause_in_any_order",
            "tests/recovery/test_diagnose.py::"
            "test_s3_6_errors_of_one_moment_must_agree_to_be_a_cause",
        ),
    ),
    Mutant(
        row="S3.6",
        what="a timestamp counts, however wrong the clock must have been",
        file="relaunch/job/diagnose.py",
        old="""    return one.error.timestamp if -AHEAD <= late <= BEHIND else None
""",
        new="""    return one.error.timestamp if late == late else None
""",
        tests=(
            "tests/recovery/test_diagnose.py::test_s3_6_a_clock_that_cannot_be_right_dates_nothing",
        ),
    ),
    Mutant(
        row="S3.6",
        what="the traceback of the cause does not travel to the user",
        file="relaunch/job/diagnose.py",
        old="""        traceback=words.text if words is not None else "",
""",
        new="",
        tests=(
            "tests/recovery/test_diagnose.py::test_s3_6_the_traceback_of_the_root_travels",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_6_the_earliest_error_is_the_cause_with_its_traceback",
            "tests/e2e/test_ranks.py::test_s3_6_the_failed_ranks_traceback_reaches_the_incident",
        ),
    ),
    Mutant(
        row="S3.6",
        what="the first failures are reported at once, without waiting for their cause",
        file="activities/gang.py",
        old="""        is_whole_job = self.input.judges and not self.input.others
        return not (is_whole_job and all(map(self._all_exited, self._nodes.values())))
""",
        new="""        return False
""",
        tests=("tests/e2e/test_ranks.py::test_s3_6_a_slow_node_is_asked_for_the_cause",),
    ),
    Mutant(
        row="S3.6",
        what="a rank that lost its peer may be the cause, like any other",
        file="relaunch/job/diagnose.py",
        old="""            return self.log(one).is_echo
""",
        new="""            return False
""",
        tests=("tests/e2e/test_ranks.py::test_s3_6_an_echo_hides_no_cause_whichever_comes_first",),
    ),
    # --- S3.7: only the job's own faults spend the job's budget
    Mutant(
        row="S3.7",
        what="each try spends the job's budget, whatever the cause",
        file="relaunch/job/ladder.py",
        old="""rung.label, rung.spends, nodes, gpus, fault.code)""",
        new="""rung.label, True, nodes, gpus, fault.code)""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_7_whose_fault_it_is_says_whose_budget_it_takes",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_7_platform_faults_fail_the_job_but_spend_no_restart",
        ),
    ),
    Mutant(
        row="S3.7",
        what="an error of the agent counts as the job's own",
        file="relaunch/job/diagnose.py",
        old="""        Cause.PLATFORM,
        f"{first.node} refused to launch: {first.reason}",
""",
        new="""        Cause.APPLICATION,
        f"{first.node} refused to launch: {first.reason}",
""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_7_whose_fault_it_is_says_whose_budget_it_takes",
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_7_platform_faults_fail_the_job_but_spend_no_restart",
        ),
    ),
    Mutant(
        row="S3.7",
        what="wrong input is tried again like any failure",
        file="relaunch/job/diagnose.py",
        old="""                do_not_restart=is_input,
""",
        new="",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_7_wrong_input_of_the_first_launch_is_not_retried",
        ),
    ),
    # --- S3.8: the generation is the round: the workflow assigns ranks, world and master
    Mutant(
        row="S3.8",
        what="the master is the last node, not that of rank 0",
        file="activities/launch.py",
        old="""Gang((prepared[0].address, prepared[0].master_port), members""",
        new="""Gang((prepared[-1].address, prepared[-1].master_port), members""",
        tests=("tests/workflows/test_job.py::test_s3_8_a_generation_gives_ranks_world_and_master",),
    ),
    Mutant(
        row="S3.8",
        what="WORLD_SIZE is the number of nodes, not that of ranks",
        file="relaunch/job/ranks.py",
        old="""world_size = str(nodes * spec.ranks_per_node)""",
        new="""world_size = str(nodes)""",
        tests=("tests/workflows/test_job.py::test_s3_8_a_generation_gives_ranks_world_and_master",),
    ),
    Mutant(
        row="S3.8",
        what="each round has the number of the first",
        file="relaunch/job/ranks.py",
        old=""""TORCHELASTIC_RESTART_COUNT": str(token.generation - 1),""",
        new=""""TORCHELASTIC_RESTART_COUNT": "0",""",
        tests=("tests/workflows/test_job.py::test_s3_8_a_generation_gives_ranks_world_and_master",),
    ),
    # --- S3.9: agent or node failure: fail the gang or replace the node, by policy
    Mutant(
        row="S3.9",
        what="no node is ever replaced",
        file="relaunch/job/ladder.py",
        old="""    return rung.strategy is not Strategy.REPLACE_NODE or bool(fault.nodes or without)
""",
        new="""    return rung.strategy is not Strategy.REPLACE_NODE
""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_9_policy_replaces_a_lost_node_or_fails_the_gang",
            "tests/workflows/test_job.py::"
            "test_s3_9_a_node_with_a_dead_shim_is_replaced_after_restarts",
        ),
    ),
    Mutant(
        row="S3.9",
        what="what the policy says of a lost node or a dead agent is not followed",
        file="relaunch/spec/policy.py",
        old="""        return self.causes.get(cause) or self.causes[Cause.UNKNOWN]
""",
        new="""        return self.causes[Cause.UNKNOWN]
""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_9_policy_replaces_a_lost_node_or_fails_the_gang",
            "tests/workflows/test_job.py::"
            "test_s3_9_a_node_with_a_dead_shim_is_replaced_after_restarts",
        ),
    ),
    # --- S3.10: a log file per rank, kept per generation
    Mutant(
        row="S3.10",
        what="all ranks of a node write one log file",
        file="relaunch/agent/state.py",
        old="""name = f"rank_{rank}.log" if stream == "stdout" else""",
        new="""name = "rank_0.log" if stream == "stdout" else""",
        tests=(
            "tests/agent/test_logs.py::test_s3_10_each_rank_of_each_generation_has_its_log",
            "tests/e2e/test_ranks.py::test_s3_10_output_is_followed_and_found_after_a_replacement",
        ),
    ),
    Mutant(
        row="S3.10",
        what="logs of an earlier generation are looked for on the nodes of the newest",
        file="relaunch/cli/logs.py",
        old="""    nodes = find_nodes(state.generation_nodes, number)
""",
        new="""    nodes = find_nodes(state.generation_nodes, state.generation)
""",
        tests=(
            "tests/e2e/test_ranks.py::test_s3_10_output_is_followed_and_found_after_a_replacement",
        ),
    ),
    # --- S3.11: the variables
    Mutant(
        row="S3.11",
        what="ROLE_NAME is not set",
        file="relaunch/job/ranks.py",
        old="""        "ROLE_NAME": "default",
""",
        new="",
        tests=(
            "tests/recovery/test_ranks.py::"
            "test_s3_11_all_ranks_share_torchelastic_and_job_variables",
            "tests/e2e/test_ranks.py::test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment",
        ),
    ),
    Mutant(
        row="S3.11",
        what="TORCHELASTIC_MAX_RESTARTS is not set",
        file="relaunch/job/ranks.py",
        old="""        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
""",
        new="",
        tests=(
            "tests/recovery/test_ranks.py::"
            "test_s3_11_all_ranks_share_torchelastic_and_job_variables",
            "tests/e2e/test_ranks.py::test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment",
        ),
    ),
    Mutant(
        row="S3.11",
        what="ROLE_RANK is the rank on the node, not that of the whole job",
        file="relaunch/job/ranks.py",
        old=""""ROLE_RANK": str(rank), **place}""",
        new=""""ROLE_RANK": str(local_rank), **place}""",
        tests=(
            "tests/recovery/test_ranks.py::"
            "test_s3_11_each_rank_has_its_numbers_and_its_places_counts",
            "tests/e2e/test_ranks.py::test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment",
        ),
    ),
    Mutant(
        row="S3.11",
        what="TORCHELASTIC_ERROR_FILE is not set",
        file="relaunch/agent/ranks/spawn.py",
        old="""        "TORCHELASTIC_ERROR_FILE": str(generation.error_path(rank)),
""",
        new="",
        tests=(
            "tests/e2e/test_ranks.py::test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment",
        ),
    ),
    Mutant(
        row="S3.3",
        what="the ranks start again when a node answers that was away for a moment",
        file="relaunch/job/decide.py",
        old="""_running(job, f"{event.node} answers again and its ranks had gone on", now)""",
        new="""Relaunch(job.generation + 1, f"{event.node} answers again")""",
        tests=(
            "tests/recovery/test_s3_torchelastic.py::"
            "test_s3_3_a_node_back_before_it_is_missed_restarts_nothing",
        ),
    ),
    Mutant(
        row="S3.3",
        what="SHRINK may leave fewer nodes than the job's minimum",
        file="relaunch/job/ladder.py",
        old="""return named and len(remaining_slots(job, suspects)) >= job.spec.fewest_nodes""",
        new="""return named and len(remaining_slots(job, suspects)) >= 1""",
        tests=(
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_job_at_its_minimum_is_left_to_the_next_rung",
        ),
    ),
    Mutant(
        row="S3.3",
        what="SHRINK is also for a job that has no more than its fewest nodes",
        file="relaunch/job/ladder.py",
        old="""    if rung.strategy is Strategy.SHRINK and len(job.slots) <= job.spec.fewest_nodes:
        return False
""",
        new="",
        tests=(
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_job_of_one_size_never_shrinks_nor_is_examined",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job never grows: granted nodes restart no rank",
        file="relaunch/job/decide.py",
        old="""Relaunch(job.generation + 1, _describe_offer(job, more), strategy=Strategy.GROW)""",
        new="""_running(job, _runs(job), now)""",
        tests=(
            "tests/recovery/test_elastic.py::"
            "test_s3_3_only_a_grant_not_an_offer_restarts_the_ranks",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_loss_and_grows_on_the_return",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_drain_and_grows_on_the_release",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_begins_small_and_leaves_nodes_others_want",
            "tests/workflows/test_elastic_jobs.py::test_s3_3_shares_of_nodes_shrink_and_grow_too",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_worker_may_die_between_the_offer_and_the_launch",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_lost_fleet_offers_again_what_its_jobs_would_take",
        ),
    ),
    Mutant(
        row="S3.3",
        what="WORLD_SIZE is that of the job's maximum, not that of the generation",
        file="relaunch/job/ranks.py",
        old="""world_size = str(nodes * spec.ranks_per_node)""",
        new="""world_size = str(spec.world_size)""",
        tests=(
            "tests/recovery/test_elastic.py::test_s3_3_the_world_is_as_large_as_the_generation",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_loss_and_grows_on_the_return",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job with fewer nodes does not say so",
        file="relaunch/job/decide.py",
        old="""    return f"{runs}; {job.fewer}; {grows}"
""",
        new="""    return runs if grows else f"{runs}; {job.fewer}"
""",
        tests=(
            "tests/recovery/test_elastic.py::"
            "test_s3_3_a_smaller_job_says_so_and_when_a_restart_pays_off",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_shrinks_on_a_drain_and_grows_on_the_release",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job never gets more than its fewest nodes",
        file="relaunch/pool/placement.py",
        old="""if not choice.missing and len(choice) < record.claim.max_nodes:""",
        new="""if not choice.missing and len(choice) < record.claim.nodes:""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_gets_its_most_if_free_and_never_too_few",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_takes_the_offer_gets_just_those_nodes",
            "tests/workflows/test_elastic_jobs.py::test_s3_3_shares_of_nodes_shrink_and_grow_too",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job is granted what is free, also less than its fewest nodes",
        file="relaunch/pool/grants.py",
        old="""        if not choice.missing and not waits_for_probes:
""",
        new="""        if len(choice) and not waits_for_probes:
""",
        tests=("tests/recovery/test_offers.py::test_s3_3_all_of_its_fewest_or_none",),
    ),
    Mutant(
        row="S3.3",
        what="a grant of fewer nodes than the most does not say why",
        file="relaunch/pool/grants.py",
        old="""            if len(grant.places) < claim.max_nodes:
""",
        new="""            if len(grant.places) < claim.nodes:
""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_gets_its_most_if_free_and_never_too_few",
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_goes_on_without_a_lost_node_and_says_so",
            "tests/recovery/test_offers.py::test_s3_3_a_node_that_is_back_is_offered",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_job_begins_small_and_leaves_nodes_others_want",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a job that could run with fewer nodes waits while the fleet grants none",
        file="relaunch/pool/grants.py",
        old="""elif self._closed and len(kept) >= claim.nodes and not has_earlier_ranks:""",
        new="""elif self._closed and len(kept) >= claim.max_nodes and not has_earlier_ranks:""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_can_run_waits_for_no_breaker_or_restore",
        ),
    ),
    Mutant(
        row="S3.3",
        what="an offer does not wait until the job has run long enough for a restart",
        file="relaunch/pool/grants.py",
        old="""        and now >= claim.more_at
""",
        new="",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_what_is_free_is_offered_once_the_job_has_run_long",
        ),
    ),
    Mutant(
        row="S3.3",
        what="the nodes of an offer are not reserved for the job that it was made to",
        file="relaunch/pool/placement.py",
        old="""    return record.claim.seq == offer.seq or record.is_waiting
""",
        new="""    return record.claim.seq < 0
""",
        tests=(
            "tests/recovery/test_offers.py::"
            "test_s3_3_a_job_that_takes_the_offer_gets_just_those_nodes",
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_is_on_the_page_and_reserves_its_nodes",
        ),
    ),
    Mutant(
        row="S3.3",
        what="a lone rank, which fences nothing, is not stopped before it joins a gang",
        file="workflows/training_job/actions.py",
        old="""bool(job.maybe_alive) and not fences(job) and will_fence(job, len(slots))""",
        new="""bool(job.maybe_alive) and fences(job) and not will_fence(job, len(slots))""",
        tests=(
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_a_lone_rank_is_stopped_before_it_joins_a_gang",
        ),
    ),
    Mutant(
        row="S3.3",
        what="the request for more nodes is not withdrawn when something else comes first",
        file="workflows/training_job/workflow.py",
        old="""        if _ends_growth(event, decision):
""",
        new="""        if not _ends_growth(event, decision) and isinstance(decision, Stop):
""",
        tests=(
            "tests/workflows/test_elastic_jobs.py::"
            "test_s3_3_an_offer_goes_back_when_a_fault_comes_first",
        ),
    ),
)
