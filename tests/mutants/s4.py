"""Changes that take out the rows of ModelArts and of the service (docs/testing.md)."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    # --- S4.1
    Mutant(
        row="S4.1",
        what="a self-healing chip is not reset: the ranks just start again",
        file="relaunch/job/ladder.py",
        old="""        if rung.strategy.repairs:
            return _repair(job, fault, rung, used, now)
""",
        new="""        if rung.strategy.repairs and rung.strategy is not Strategy.RESET_GPU:
            return _repair(job, fault, rung, used, now)
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_1_a_chip_that_heals_is_reset_in_place_for_free",
        ),
    ),
    Mutant(
        row="S4.1",
        what="a reset takes one of the job's restarts",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.GPU_RESET]]
strategy = "RESET_GPU"
tries = 2
window = "24h"
key = ["node", "gpu", "code"]
spends = false
""",
        new="""[[causes.GPU_RESET]]
strategy = "RESET_GPU"
tries = 2
window = "24h"
key = ["node", "gpu", "code"]
spends = true
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_1_a_chip_that_heals_is_reset_in_place_for_free",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_1_in_place_recovery_needs_no_restart_to_be_left",
        ),
    ),
    Mutant(
        row="S4.1",
        what="a reset that healed the chip goes up the ladder, an ambiguous one relaunches",
        file="relaunch/job/decide.py",
        old="""        case RepairEnded(outcome="done") if answers(job, event):
""",
        new="""        case RepairEnded(outcome="ambiguous") if answers(job, event):
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_1_a_chip_that_heals_is_reset_in_place_for_free",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_1_in_place_recovery_needs_no_restart_to_be_left",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_2_a_failed_reset_isolates_the_node_and_reschedules",
            "tests/workflows/test_repair.py"
            "::test_s4_1_a_gpu_that_a_reset_heals_keeps_the_job_in_place",
        ),
    ),
    Mutant(
        row="S4.1",
        what="the node's GPUs are listed instead of reset",
        file="relaunch/agent/node/repairs.py",
        old="""            "nvidia-smi", ["--gpu-reset", *(""",
        new="""            "nvidia-smi", ["--list-gpus", *(""",
        tests=(
            "tests/e2e/test_nodes.py::test_s4_1_a_gpu_is_reset_by_bus_id_and_the_job_stays_there",
        ),
    ),
    # --- S4.2
    Mutant(
        row="S4.2",
        what="a reset that failed is tried again instead of the next rung",
        file="relaunch/job/apply.py",
        old="failed=(*job.recovering.failed, job.tries[-1].rung)",
        new="failed=job.recovering.failed",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_2_a_failed_reset_isolates_the_node_and_reschedules",
            "tests/workflows/test_repair.py"
            "::test_s4_2_a_node_is_replaced_where_its_reset_does_not_help",
        ),
    ),
    Mutant(
        row="S4.2",
        what="a rung that replaces or isolates a node goes on with that node",
        file="relaunch/job/ladder.py",
        old="""    if rung.isolate or rung.strategy in (Strategy.REPLACE_NODE, Strategy.SHRINK):
        without = tuple(dict.fromkeys((*without, *fault.nodes)))
    if rung.strategy is Strategy.SHRINK:
        wanted = count_noun(job.spec.node_count, "node")
        reason += f", to {len(remaining_slots(job, without))} of {wanted}"
    return Relaunch(
        job.generation + 1,
        reason,
        strategy=rung.strategy,
        take=take,
        left=left,
        without=without,
        avoid=fault.nodes if rung.isolate else (),
""",
        new="""    if rung.strategy is Strategy.SHRINK:
        without = tuple(dict.fromkeys((*without, *fault.nodes)))
        wanted = count_noun(job.spec.node_count, "node")
        reason += f", to {len(remaining_slots(job, without))} of {wanted}"
    return Relaunch(
        job.generation + 1,
        reason,
        strategy=rung.strategy,
        take=take,
        left=left,
        without=without,
        avoid=(),
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_2_a_failed_reset_isolates_the_node_and_reschedules",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_5_the_faulty_node_is_isolated_before_the_reschedule",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_5_a_lost_node_is_isolated_and_the_job_rescheduled",
            "tests/recovery/test_s4_modelarts.py::test_s4_5_it_ends_with_the_restarts",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_6_only_the_faulty_pod_moves_and_its_node_is_isolated",
            "tests/workflows/test_repair.py"
            "::test_s4_2_a_node_is_replaced_where_its_reset_does_not_help",
            "tests/workflows/test_jobs_and_fleet.py"
            "::test_s4_2_a_spare_replaces_a_broken_node_until_its_repair",
        ),
    ),
    # --- S4.3
    Mutant(
        row="S4.3",
        what="every rung has one try more than the policy says",
        file="relaunch/job/ladder.py",
        old="""        if rung.tries is not None and used >= rung.tries:
""",
        new="""        if rung.tries is not None and used > rung.tries:
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_a_chips_third_equal_code_in_24_hours_is_not_reset",
            "tests/recovery/test_s4_modelarts.py::test_s4_3_the_users_doing_costs_no_healthy_chip",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_a_users_third_equal_npu_code_isolates_nothing",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_progress_in_between_makes_no_difference",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_without_pods_the_whole_job_is_rescheduled",
        ),
    ),
    Mutant(
        row="S4.3",
        what="a try never leaves its window",
        file="relaunch/job/ladder.py",
        old="if one.at > now - rung.window or",
        new="if one.at <= now or",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_a_chips_third_equal_code_in_24_hours_is_not_reset",
        ),
    ),
    Mutant(
        row="S4.3",
        what="progress forgets the tries within a window",
        file="relaunch/job/ladder.py",
        old="if one.at > now - rung.window or _is_without_progress(job, one)",
        new="""if one.at > now - rung.window
            and (job.progressed_at is None or one.at >= job.progressed_at)""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_progress_in_between_makes_no_difference",
        ),
    ),
    Mutant(
        row="S4.3",
        what="tries count whatever node they were for",
        file="relaunch/job/ladder.py",
        old="""                agrees = _overlap(one.nodes, fault.nodes)
""",
        new="""                agrees = True
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_one_address_on_another_node_is_another_chip",
        ),
    ),
    Mutant(
        row="S4.3",
        what="the node is isolated also for what the user's input causes",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.GPU_USER_INDUCED]]
strategy = "RESCHEDULE_JOB"
""",
        new="""[[causes.GPU_USER_INDUCED]]
strategy = "RESCHEDULE_JOB"
isolate = true
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py::test_s4_3_the_users_doing_costs_no_healthy_chip",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_a_users_third_equal_npu_code_isolates_nothing",
        ),
    ),
    Mutant(
        row="S4.3",
        what="no code of an NPU is known as the user's doing",
        file="relaunch/evidence/catalog/__init__.py",
        old="""        if one.by == USER:
""",
        new="""        if one.by == USER and not one.code:
""",
        tests=(
            "tests/recovery/test_catalog.py::test_s4_3_an_npu_code_is_read_as_mindcluster_says",
            "tests/recovery/test_catalog.py::test_s4_3_all_802_codes_of_mindcluster_are_there",
            "tests/recovery/test_exits.py::test_s4_3_an_npu_code_in_a_log_is_read_by_the_table",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_3_a_users_third_equal_npu_code_isolates_nothing",
        ),
    ),
    # --- S4.4
    Mutant(
        row="S4.4",
        what="the job is rescheduled four times in a row, not three",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.UNKNOWN]]
strategy = "RESCHEDULE_JOB"
tries = 3
""",
        new="""[[causes.UNKNOWN]]
strategy = "RESCHEDULE_JOB"
tries = 4
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_4_after_three_reschedules_the_next_failure_is_final",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_4_the_last_failures_exit_code_is_that_of_the_job",
        ),
    ),
    Mutant(
        row="S4.4",
        what="a fault of a node or a chip in between does not begin the count again",
        file="relaunch/job/ladder.py",
        old="if one.cause in rung.reset_by if rung.reset_by else one.cause",
        new="if not rung.reset_by and one.cause",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_4_after_three_reschedules_the_next_failure_is_final",
        ),
    ),
    Mutant(
        row="S4.4",
        what="an unconditional reschedule takes no restart",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.UNKNOWN]]
strategy = "RESCHEDULE_JOB"
""",
        new="""[[causes.UNKNOWN]]
strategy = "RESCHEDULE_JOB"
spends = false
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_4_every_nonzero_exit_counts_and_takes_a_restart",
            "tests/e2e/test_presets.py::test_s4_4_modelarts_reschedules_the_whole_job_three_times",
        ),
    ),
    # --- S4.5
    Mutant(
        row="S4.5",
        what="the job is rescheduled after a fatal fault, and the node is not isolated",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.GPU_FATAL]]
strategy = "RESCHEDULE_JOB"
isolate = true
""",
        new="""[[causes.GPU_FATAL]]
strategy = "RESCHEDULE_JOB"
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_5_the_faulty_node_is_isolated_before_the_reschedule",
            "tests/recovery/test_s4_modelarts.py::test_s4_5_it_ends_with_the_restarts",
        ),
    ),
    Mutant(
        row="S4.5",
        what="the job is rescheduled after a lost node, and the node is not isolated",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.NODE_LOST]]
strategy = "RESCHEDULE_JOB"
isolate = true
""",
        new="""[[causes.NODE_LOST]]
strategy = "RESCHEDULE_JOB"
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_5_a_lost_node_is_isolated_and_the_job_rescheduled",
        ),
    ),
    # --- S4.6
    Mutant(
        row="S4.6",
        what="all pods are scheduled again, not only that of the faulty node",
        file="relaunch/job/ladder.py",
        old="keep_nodes=rung.strategy is not Strategy.RESCHEDULE_JOB,",
        new="keep_nodes=rung.strategy not in (Strategy.RESCHEDULE_JOB, Strategy.REPLACE_NODE),",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_6_only_the_faulty_pod_moves_and_its_node_is_isolated",
        ),
    ),
    Mutant(
        row="S4.6",
        what="pods are moved for ever and never end in a reschedule of the job",
        file="relaunch/job/ladder.py",
        old="""        if rung.tries is not None and used >= rung.tries:
""",
        new="""        is_pod = rung.strategy is Strategy.REPLACE_NODE
        if rung.tries is not None and used >= rung.tries and not is_pod:
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_6_after_the_pods_retries_the_job_is_rescheduled",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_6_a_pod_that_fits_nowhere_ends_in_a_job_reschedule",
        ),
    ),
    Mutant(
        row="S4.6",
        what="each cause has its own count of moved pods",
        file="relaunch/job/ladder.py",
        old="""            case "job":
                continue
""",
        new="""            case "job":
                agrees = one.cause is fault.cause
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_6_after_the_pods_retries_the_job_is_rescheduled",
            "tests/recovery/test_annotations.py"
            "::test_s4_8_pod_retry_num_counts_moved_pods_for_all_causes",
        ),
    ),
    # --- S4.7
    Mutant(
        row="S4.7",
        what="hangs need not be in a row to count",
        file="relaunch/spec/presets/modelarts.toml",
        old="""[[causes.HANG]]
strategy = "RESTART_IN_PLACE"
tries = 3
consecutive = true
""",
        new="""[[causes.HANG]]
strategy = "RESTART_IN_PLACE"
tries = 3
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_7_a_hang_restarts_in_place_three_times_in_a_row",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_7_hangs_that_training_has_passed_are_no_row",
        ),
    ),
    Mutant(
        row="S4.7",
        what="a hang takes a restart",
        file="relaunch/spec/presets/modelarts.toml",
        old="""consecutive = true
spends = false
[[causes.HANG]]
""",
        new="""consecutive = true
[[causes.HANG]]
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_7_a_hang_takes_no_restart_and_begins_at_30_minutes",
            "tests/e2e/test_presets.py::test_s4_7_modelarts_restarts_a_hang_in_place_at_no_cost",
        ),
    ),
    Mutant(
        row="S4.7",
        what="training counts as hung after 10 minutes, not 30",
        file="relaunch/spec/presets/modelarts.toml",
        old="""hang = { after = "30m",""",
        new="""hang = { after = "10m",""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_7_a_hang_takes_no_restart_and_begins_at_30_minutes",
        ),
    ),
    # --- S4.8
    Mutant(
        row="S4.8",
        what="job-unconditional-retry switches off what it should switch on",
        file="relaunch/spec/annotations.py",
        old="""    if not _read_flag(ours, UNCONDITIONAL):
""",
        new="""    if _read_flag(ours, UNCONDITIONAL):
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py::test_s4_8_annotations_switch_each_recovery_on",
            "tests/recovery/test_annotations.py::test_s4_8_what_every_combination_decides",
            "tests/recovery/test_annotations.py"
            "::test_s4_8_what_is_said_to_be_off_is_as_what_is_not_said",
            "tests/recovery/test_annotations.py::test_s4_8_everything_on_is_the_preset",
        ),
    ),
    Mutant(
        row="S4.8",
        what="hang-retry with the value false switches hangs on",
        file="relaunch/spec/annotations.py",
        old="""    if not _read_flag(ours, HANG_RETRY):
""",
        new="""    if HANG_RETRY not in ours:
""",
        tests=(
            "tests/recovery/test_annotations.py::test_s4_8_what_every_combination_decides",
            "tests/recovery/test_annotations.py"
            "::test_s4_8_what_is_said_to_be_off_is_as_what_is_not_said",
        ),
    ),
    Mutant(
        row="S4.8",
        what="pod-retry-num switches pods on, and its number is ignored",
        file="relaunch/spec/annotations.py",
        old="""            rung.model_copy(update={"tries": pods})
""",
        new="""            rung.model_copy(update={"tries": rung.tries if pods else 0})
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py::test_s4_8_annotations_switch_each_recovery_on",
            "tests/recovery/test_annotations.py"
            "::test_s4_8_pod_retry_num_counts_moved_pods_for_all_causes",
        ),
    ),
    Mutant(
        row="S4.8",
        what="a rung that is switched off stays in its ladder with 0 tries",
        file="relaunch/spec/annotations.py",
        old="""tuple(rung for rung in rungs if rung.tries != 0) or FAIL
""",
        new="""tuple(rungs) or FAIL
""",
        tests=(
            "tests/recovery/test_annotations.py"
            "::test_s4_8_every_combination_is_a_policy_that_holds_together",
        ),
    ),
    Mutant(
        row="S4.8",
        what="a ladder that is switched off becomes that of UNKNOWN",
        file="relaunch/spec/annotations.py",
        old="""tuple(rung for rung in rungs if rung.tries != 0) or FAIL
""",
        new="""tuple(one for one in rungs if one.tries != 0) or causes[Cause.UNKNOWN]
""",
        tests=(
            "tests/recovery/test_annotations.py"
            "::test_s4_8_a_users_ladder_never_becomes_that_of_another_cause",
        ),
    ),
    Mutant(
        row="S4.8",
        what="annotations switch nothing where the policy sets timeouts",
        file="relaunch/spec/annotations.py",
        old="""    changed = state_restarts(policy, _read_count(ours, JOB_RETRIES))
""",
        new="""    changed = state_restarts(policy, _read_count(ours, JOB_RETRIES))
    if "timeouts" in policy.model_fields_set:
        return changed
""",
        tests=(
            "tests/recovery/test_annotations.py"
            "::test_s4_8_a_policy_that_extends_modelarts_switches_as_well",
        ),
    ),
    # --- S4.9
    Mutant(
        row="S4.9",
        what="MA_PROC_START_CNT does not grow when a node starts again in its place",
        file="relaunch/job/ranks.py",
        old="before.scheduled, before.started + 1, place.gpus)",
        new="before.scheduled, before.started, place.gpus)",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_9_a_place_counts_its_nodes_and_the_starts_on_each",
            "tests/e2e/test_ranks.py::test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment",
        ),
    ),
    Mutant(
        row="S4.9",
        what="a rescheduled job counts as started once more in each place that it gets again",
        file="relaunch/job/ranks.py",
        old="""        elif before.node == place.node and not reassign:
""",
        new="""        elif before.node == place.node:
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_9_a_rescheduled_job_is_new_in_every_place",
        ),
    ),
    Mutant(
        row="S4.9",
        what="the job's state forgets the counters of its places",
        file="relaunch/job/apply.py",
        old="""        slots=event.slots,
        fewer=event.fewer,
""",
        new="""        slots=tuple(replace(one, scheduled=1, started=1) for one in event.slots),
        fewer=event.fewer,
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py::test_s4_9_the_counters_live_in_the_jobs_state",
        ),
    ),
    # --- S4.10
    Mutant(
        row="S4.10",
        what="the job's grace period changes nothing",
        file="relaunch/spec/annotations.py",
        old="""    if policy.timeouts.stop_grace <= limit:
        return policy
""",
        new="""    if limit:
        return policy
""",
        tests=(
            "tests/recovery/test_annotations.py"
            "::test_s4_10_the_grace_period_of_the_job_bounds_stop_grace",
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_10_a_shorter_grace_shortens_the_wait_for_a_lost_node",
            "tests/console/test_files.py::test_s4_10_a_job_file_may_bound_the_stop_grace",
            "tests/console/test_torchrun.py"
            "::test_s4_10_run_takes_the_grace_period_that_its_ranks_get",
        ),
    ),
    Mutant(
        row="S4.10",
        what="a malformed grace period is ignored",
        file="relaunch/spec/annotations.py",
        old="""    if not is_number or int(value) == 0:
        raise ValueError(
            f"{GRACE_PERIOD} is {value[:40]!r}:"
            " a whole number of seconds from 1, or -1 for no limit"
        )
""",
        new="""    if not is_number or int(value) == 0:
        return policy
""",
        tests=(
            "tests/recovery/test_annotations.py::test_s4_10_an_unreadable_grace_period_is_refused",
            "tests/console/test_torchrun.py::test_s4_10_run_refuses_a_bad_grace_period",
        ),
    ),
    Mutant(
        row="S4.10",
        what="a policy's stop_grace is ignored",
        file="relaunch/spec/policy.py",
        old="""        below = merged.get(key)
""",
        new="""        below = merged.get(key)
        if key == "timeouts" and isinstance(value, dict):
            value = {name: one for name, one in value.items() if name != "stop_grace"}
""",
        tests=(
            "tests/recovery/test_s4_modelarts.py"
            "::test_s4_10_how_long_ranks_may_take_to_stop_is_in_the_policy",
        ),
    ),
    Mutant(
        row="S4.10",
        what="nodes are ordered to stop one after the other",
        file="activities/stop.py",
        old="""    news = asyncio.Event()

    async def stop(node: str) -> None:
        while True:
            answer = await _try_to_stop(backend, node, order, input.places)
""",
        new="""    news = asyncio.Event()
    turn = asyncio.Lock()

    async def stop(node: str) -> None:
        while True:
            async with turn:
                answer = await _try_to_stop(backend, node, order, input.places)
""",
        tests=(
            "tests/activities/test_orders.py"
            "::test_s4_10_ranks_are_stopped_on_all_nodes_at_once[stop]",
        ),
    ),
    Mutant(
        row="S4.10",
        what="nodes are prepared, which stops older ranks, one after the other",
        file="activities/launch.py",
        old="""    results = await asyncio.gather(*(one(node) for node in nodes))
""",
        new="""    results = [await one(node) for node in nodes]
""",
        tests=(
            "tests/activities/test_orders.py"
            "::test_s4_10_ranks_are_stopped_on_all_nodes_at_once[prepare]",
        ),
    ),
    # --- S5.1
    Mutant(
        row="S5.1",
        what="a run that continues another begins with full budgets",
        file="workflows/training_job/workflow.py",
        old="""                resume=job,
""",
        new="""                resume=replace(job, restarts_spent=0, tries=()),
""",
        tests=(
            "tests/workflows/test_continue_as_new.py"
            "::test_s5_1_recoveries_over_many_runs_are_counted_exactly",
        ),
    ),
    Mutant(
        row="S5.1",
        what="a watch that its worker or the server has lost is not begun again",
        file="workflows/training_job/commands.py",
        old="""    maximum_interval=timedelta(seconds=5),
)
\"\"\"For watches""",
        new="""    maximum_interval=timedelta(seconds=5),
    maximum_attempts=1,
)
\"\"\"For watches""",
        tests=(
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_ranks_and_counts_outlive_a_killed_worker",
            "tests/e2e/test_controller_away.py"
            "::test_s2_4_s5_1_a_server_away_beyond_the_lease_costs_nothing",
        ),
    ),
    Mutant(
        row="S5.1",
        what="an examination whose worker was killed is not begun again",
        file="workflows/training_job/commands.py",
        old="""            start_to_close_timeout=within,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
""",
        new="""            start_to_close_timeout=within,
            heartbeat_timeout=BEAT,
            retry_policy=RetryPolicy(maximum_attempts=1),
""",
        tests=(
            "tests/e2e/test_nodes.py"
            "::test_s1_6_s5_1_a_worker_killed_midway_repeats_nothing[while it is examined]",
        ),
    ),
    # --- S5.2
    Mutant(
        row="S5.2",
        what="a submitted job is not started for minutes",
        file="relaunch/cli/submit.py",
        old="""            task_timeout=TASK_TIMEOUT,
""",
        new="""            task_timeout=TASK_TIMEOUT,
            start_delay=100 * TASK_TIMEOUT,
""",
        tests=(
            "tests/console/test_command_line.py"
            "::test_s5_2_a_job_is_submitted_shown_retried_and_cancelled",
        ),
    ),
    Mutant(
        row="S5.2",
        what="submitting a job that runs joins it without a word",
        file="relaunch/cli/submit.py",
        old="""WorkflowIDConflictPolicy.FAIL,
""",
        new="""WorkflowIDConflictPolicy.USE_EXISTING,
""",
        tests=(
            "tests/console/test_command_line.py"
            "::test_s5_2_a_job_is_submitted_shown_retried_and_cancelled",
        ),
    ),
    # --- S5.3
    Mutant(
        row="S5.3",
        what="the page of a job has no decisions",
        file="workflows/search_attributes.py",
        old="""            *incident.decisions[-8:],
""",
        new="",
        tests=(
            "tests/workflows/test_job_details.py"
            "::test_s5_3_the_page_of_a_job_is_its_incident_report",
            "tests/workflows/test_job.py::test_s5_3_the_web_ui_gets_the_recovery_in_words",
        ),
    ),
    Mutant(
        row="S5.3",
        what="the web UI gets no page of the job",
        file="workflows/training_job/workflow.py",
        old="""        workflow.set_current_details(current_details(job, workflow.now()))
""",
        new="",
        tests=("tests/workflows/test_job.py::test_s5_3_the_web_ui_gets_the_recovery_in_words",),
    ),
    # --- S5.4
    Mutant(
        row="S5.4",
        what="a cancel changes nothing",
        file="relaunch/job/decide.py",
        old="""        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
""",
        new="""        case CancelRequested(by=str()):
            return Ignore("it is not cancelled")
        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
""",
        tests=("tests/recovery/test_decide.py::test_s5_4_cancel_works_in_every_phase",),
    ),
    Mutant(
        row="S5.4",
        what="a cancelled job ends as FAILED",
        file="relaunch/job/decide.py",
        old="""        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
                Phase.CANCELLED,
""",
        new="""        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
                Phase.FAILED,
""",
        tests=(
            "tests/recovery/test_decide.py::test_s5_4_cancel_works_in_every_phase",
            "tests/workflows/test_control.py::test_s5_4_cancel_stops_running_ranks[signal]",
            "tests/workflows/test_control.py::test_s5_4_cancel_stops_running_ranks[temporal]",
            "tests/workflows/test_control.py::test_s5_4_cancel_while_ranks_are_launched",
            "tests/workflows/test_control.py::test_s5_4_cancel_while_nodes_are_waited_for",
            "tests/workflows/test_control.py::test_s5_4_cancel_while_a_person_is_asked",
            "tests/workflows/test_control.py::test_s5_4_cancel_during_the_delay_before_a_restart",
        ),
    ),
    Mutant(
        row="S5.4",
        what="a forced retry goes on with the nodes that it was to avoid",
        file="relaunch/job/decide.py",
        old="""        avoid=event.avoid_nodes,
""",
        new="""        avoid=(),
""",
        tests=(
            "tests/recovery/test_decide.py::test_s5_4_force_retry_launches_again_without_spending",
            "tests/workflows/test_control.py"
            "::test_s5_4_force_retry_while_running_relaunches_all_ranks",
        ),
    ),
    Mutant(
        row="S5.4",
        what="a forced retry changes nothing",
        file="relaunch/job/decide.py",
        old="""        case Submitted() | RetryRequested():
            return _decide_on_request(job, event)
""",
        new="""        case RetryRequested():
            return Ignore("it goes on as it is")
        case Submitted():
            return _decide_on_request(job, event)
""",
        tests=(
            "tests/recovery/test_decide.py::test_s5_4_force_retry_launches_again_without_spending",
            "tests/workflows/test_control.py"
            "::test_s5_4_force_retry_while_launching_gives_up_that_launch",
            "tests/workflows/test_control.py"
            "::test_s5_4_force_retry_while_asking_renews_budgets_on_request",
            "tests/workflows/test_control.py"
            "::test_s5_4_force_retry_while_waiting_looks_for_other_nodes",
        ),
    ),
    # --- S5.5
    Mutant(
        row="S5.5",
        what="the workers of docker-compose.yml serve no metrics",
        file="docker-compose.yml",
        old="""    RELAUNCH_METRICS: "0.0.0.0:9464"  #""",
        new="""    #""",
        tests=(
            "tests/deploy/test_compose.py::test_s5_5_it_has_server_database_ui_metrics_and_workers",
        ),
    ),
    Mutant(
        row="S5.5",
        what="the workers do not wait for the namespace",
        file="docker-compose.yml",
        old="""    namespace: {condition: service_completed_successfully}
""",
        new="""    temporal: {condition: service_healthy}
""",
        tests=(
            "tests/deploy/test_compose.py::test_s5_5_it_starts_from_the_database_to_the_workers",
        ),
    ),
    # --- S5.6
    Mutant(
        row="S5.6",
        what="boto3 is no library that relaunch is built with",
        file="pyproject.toml",
        old="""    "boto3==1.44.5",""",
        new="""    #""",
        tests=(
            "tests/test_layering.py::test_s5_6_names_at_the_top_and_libraries_are_those_agreed",
        ),
    ),
)
