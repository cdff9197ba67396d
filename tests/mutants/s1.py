"""Changes that take out the rows of ecs-gpu-recovery (docs/testing.md)."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    # --- S1.1: every end of a rank or task is classified
    Mutant(
        row="S1.1",
        what="any exit code has the node examined, not only 1",
        file="relaunch/spec/presets/ecs-reboot-once.toml",
        old="""codes = ["exit 1"]
""",
        new="",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_1_every_way_to_end_is_classified",
            "tests/e2e/test_presets.py::test_s1_1_ecs_reboot_once_fails_at_once_for_any_other_exit",
        ),
    ),
    Mutant(
        row="S1.1",
        what="an exit code is not named in the reason",
        file="relaunch/evidence/exits.py",
        old="""        how = f"exited with code {exit_code}" + (""",
        new="""        how = "has failed" + (""",
        tests=(
            "tests/recovery/test_diagnose.py"
            "::test_s1_1_every_exit_is_named_with_its_code_or_signal",
            "tests/recovery/test_exits.py::test_s1_1_a_code_that_stands_for_a_signal_says_so",
        ),
    ),
    Mutant(
        row="S1.1",
        what="134, 137 and 139 do not stand for a signal",
        file="relaunch/evidence/exits.py",
        old="""    if exit_code - 128 in SIGNALS:
        return exit_code - 128
""",
        new="",
        tests=(
            "tests/recovery/test_exits.py::test_s1_1_a_code_that_stands_for_a_signal_says_so",
            "tests/recovery/test_exits.py::test_s1_1_every_end_of_an_ecs_task_is_classified",
        ),
    ),
    Mutant(
        row="S1.1",
        what="why ECS stopped a task (spot, failed start, memory) is not looked at",
        file="relaunch/evidence/exits.py",
        old="""    for row in catalog.ecs_stops:
""",
        new="""    for row in ():
""",
        tests=(
            "tests/recovery/test_exits.py::test_s1_1_every_end_of_an_ecs_task_is_classified",
            "tests/recovery/test_diagnose.py::test_s1_1_what_ecs_says_of_a_ranks_end",
        ),
    ),
    Mutant(
        row="S1.1",
        what="the exit code of a rank's container is not read",
        file="relaunch/backends/ecs/stream.py",
        old="""    code = trainer.exit_code if trainer is not None else None
""",
        new="""    code = None
""",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_1_a_rank_that_exits_is_reported_with_its_exit_code",
            "tests/backends/test_ecs.py::test_s1_1_what_ended_a_task_is_reported_without_exit_code",
            "tests/backends/test_ecs_names.py"
            "::test_s1_1_the_end_of_a_task_is_reported_with_words_of_ecs",
        ),
    ),
    Mutant(
        row="S1.1",
        what="a missing exit code is taken for 0",
        file="relaunch/backends/ecs/stream.py",
        old="""    code = trainer.exit_code if trainer is not None else None
""",
        new="""    code = (trainer.exit_code or 0) if trainer is not None else 0
""",
        tests=(
            "tests/backends/test_ecs.py::test_s1_1_what_ended_a_task_is_reported_without_exit_code",
            "tests/backends/test_ecs_names.py"
            "::test_s1_1_the_end_of_a_task_is_reported_with_words_of_ecs",
        ),
    ),
    Mutant(
        row="S1.1",
        what="a task that a user stopped is reported like any other exit",
        file="relaunch/backends/ecs/stream.py",
        old="""USER = "UserInitiated"
""",
        new="""USER = "StoppedByUser"
""",
        tests=(
            "tests/backends/test_ecs.py::test_s1_1_a_stop_by_a_user_is_distinguished_from_ours",
            "tests/backends/test_ecs_names.py"
            "::test_s1_1_a_task_stopped_by_a_user_says_so_and_so_does_ours",
            "tests/e2e/test_ecs.py::test_s1_1_a_task_that_a_person_stops_cancels_the_job",
        ),
    ),
    Mutant(
        row="S1.1",
        what="every failed job is FAILED in the tables, none FAILED_OTHERS",
        file="relaunch/backends/ecs/legacy_rows.py",
        old="""\
        return JobStatus.FAILED if job.exit_code in (None, 0, 1) else JobStatus.FAILED_OTHERS
""",
        new="""        return JobStatus.FAILED
""",
        tests=("tests/backends/test_ecs_mirror.py::test_s1_1_a_phase_is_the_documented_status",),
    ),
    # --- S1.2: the whole generation is stopped
    Mutant(
        row="S1.2",
        what="one node that is proven stopped counts for all nodes",
        file="relaunch/job/apply.py",
        old="""    return replace(prove_stopped(job, event.nodes), incident=incident)
""",
        new="""    return replace(prove_stopped(job, job.maybe_alive), incident=incident)
""",
        tests=(
            "tests/recovery/test_s1_ecs.py"
            "::test_s1_2_one_rank_fails_and_the_whole_generation_is_stopped",
        ),
    ),
    Mutant(
        row="S1.2",
        what="a stop proves that tasks have ended without stopping them",
        file="relaunch/backends/ecs/launch.py",
        old="""\
        living = [task for task in own if not task.stopped and _key(task) <= fence.key(token)]
""",
        new="""\
        living = [task for task in own if task.stopped and _key(task) > fence.key(token)]
""",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_2_a_stop_ends_when_ecs_says_stopped_or_knows_no_task",
        ),
    ),
    Mutant(
        row="S1.2",
        what="after the first generation only the last node's ranks are started",
        file="activities/launch.py",
        old="""            [slot.node for slot in input.slots],
            lambda node: backend.start(node, orders[node]),
""",
        new="""\
            [slot.node for slot in input.slots][-1 if input.token.generation > 1 else 0 :],
            lambda node: backend.start(node, orders[node]),
""",
        tests=(
            "tests/e2e/test_ecs.py::test_s1_2_a_rank_that_fails_has_all_ranks_relaunched",
            "tests/e2e/test_ecs.py::test_s1_2_a_worker_killed_between_calls_doubles_no_task",
            "tests/e2e/test_ecs.py::test_s1_2_a_worker_may_be_killed_at_any_call_of_a_recovery",
        ),
    ),
    # --- S1.3: the node of the failed task is examined, once its GPUs are free
    Mutant(
        row="S1.3",
        what="the node of the job's first rank is examined, whichever failed",
        file="relaunch/job/ladder.py",
        old="""    nodes = fault.nodes or tuple(slot.node for slot in job.slots)
    limit = job.policy.timeouts.examination
""",
        new="""    nodes = tuple(slot.node for slot in job.slots)[:1]
    limit = job.policy.timeouts.examination
""",
        tests=(
            "tests/recovery/test_s1_ecs.py"
            "::test_s1_3_suspects_are_examined_once_their_ranks_stopped",
            "tests/e2e/test_nodes.py::test_s1_3_s1_5_s1_6_a_sick_node_is_rebooted_once_and_proven",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
            "tests/e2e/test_ecs.py::test_s1_3_the_failing_ranks_node_is_examined_after_an_echo",
        ),
    ),
    Mutant(
        row="S1.3",
        what="a fault is reported at once, though only echoes of it have arrived",
        file="activities/gang.py",
        old="""\
        return not (is_whole_job and all(map(self._all_exited, self._nodes.values())))
""",
        new="""        return is_whole_job and False
""",
        tests=(
            "tests/activities/test_watch.py"
            "::test_s1_3_echoes_wait_for_a_root_that_is_reported_late",
            "tests/e2e/test_ecs.py::test_s1_3_the_failing_ranks_node_is_examined_after_an_echo",
        ),
    ),
    Mutant(
        row="S1.3",
        what="the examination is placed on another node than the one asked about",
        file="relaunch/backends/ecs/examine.py",
        old="""                client_token=client_token("diagnose", id, uuid.uuid4().hex),
            )
""",
        new="""                client_token=client_token("diagnose", id, uuid.uuid4().hex),
            )
            elsewhere = f"ec2InstanceId != {instance.ec2_id}"
            asked["placementConstraints"][0]["expression"] = elsewhere
""",
        tests=(
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_3_only_the_node_that_is_asked_about_is_examined",
        ),
    ),
    Mutant(
        row="S1.3",
        what="the examination reserves no GPUs",
        file="relaunch/backends/ecs/examine.py",
        old="""                gpus=gpus,
""",
        new="""                gpus=0,
""",
        tests=(
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_3_only_the_node_that_is_asked_about_is_examined",
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_3_gpus_that_are_never_free_are_called_busy_in_time",
        ),
    ),
    Mutant(
        row="S1.3",
        what="an examination is given up where stopping ranks still hold GPUs",
        file="relaunch/backends/ecs/examine.py",
        old="""            if not placed.reason.startswith("RESOURCE:"):
""",
        new="""            if placed.reason:
""",
        tests=(
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_3_an_examination_waits_for_gpus_of_stopping_ranks",
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_3_gpus_that_are_never_free_are_called_busy_in_time",
        ),
    ),
    # --- S1.4: every wait has a deadline and a next step
    Mutant(
        row="S1.4",
        what="an examination has no deadline",
        file="relaunch/job/ladder.py",
        old="""        f"without a verdict after {duration(limit)} it counts as UNKNOWN",
        until=now + limit,
""",
        new="""        f"without a verdict after {duration(limit)} it counts as UNKNOWN",
        until=None,
""",
        tests=(
            "tests/recovery/test_s1_ecs.py"
            "::test_s1_4_an_examination_has_a_phase_deadline_and_next_step",
            "tests/recovery/test_s1_ecs.py::test_s1_4_every_wait_has_a_deadline_and_a_next_step",
        ),
    ),
    Mutant(
        row="S1.4",
        what="nothing follows the deadline of an examination",
        file="relaunch/job/decide.py",
        old="""        case Phase.EXAMINING | Phase.REPAIRING if job.recovering is not None:
""",
        new="""        case Phase.REPAIRING if job.recovering is not None:
""",
        tests=(
            "tests/recovery/test_s1_ecs.py"
            "::test_s1_4_an_examination_has_a_phase_deadline_and_next_step",
        ),
    ),
    Mutant(
        row="S1.4",
        what="an examination that finds nothing out calls the node healthy",
        file="relaunch/evidence/health.py",
        old="""\
        verdict, reason = Verdict.UNKNOWN, _join_clauses([*unread, *_list_symptoms(findings)])
""",
        new="""\
        verdict, reason = Verdict.HEALTHY, _join_clauses([*unread, *_list_symptoms(findings)])
""",
        tests=(
            "tests/workflows/test_repair.py"
            "::test_s1_4_an_examination_that_never_ends_is_inconclusive",
        ),
    ),
    Mutant(
        row="S1.4",
        what="a reboot that failed or never happened is followed by a launch",
        file="relaunch/job/decide.py",
        old="""        case RepairEnded(outcome="done") if answers(job, event):
""",
        new="""        case RepairEnded() if answers(job, event):
""",
        tests=(
            "tests/workflows/test_repair.py::test_s1_4_a_futile_reboot_ends_and_the_ladder_goes_on",
        ),
    ),
    # --- S1.5: healthy -> fail; unhealthy -> one reboot, then fail
    Mutant(
        row="S1.5",
        what="the verdict is not asked for: a healthy node's job is launched again",
        file="relaunch/spec/presets/ecs-reboot-once.toml",
        old="""when = ["UNHEALTHY"]
""",
        new="",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_5_the_verdict_and_the_retry_count_decide",
            "tests/workflows/test_repair.py"
            "::test_s1_5_a_healthy_node_is_not_rebooted_and_the_job_fails",
            "tests/e2e/test_presets.py::test_s1_5_ecs_reboot_once_examines_after_exit_1_then_fails",
            "tests/e2e/test_nodes.py::test_s1_5_on_a_healthy_node_the_job_fails_without_reboot",
            "tests/e2e/test_ecs.py::test_s1_5_s1_7_a_fault_on_healthy_nodes_fails_and_notifies",
        ),
    ),
    Mutant(
        row="S1.5",
        what="healthy nodes are rebooted, and unhealthy ones fail the job",
        file="relaunch/spec/presets/ecs-reboot-once.toml",
        old="""when = ["UNHEALTHY"]
""",
        new="""when = ["HEALTHY"]
""",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_5_the_verdict_and_the_retry_count_decide",
            "tests/workflows/test_repair.py"
            "::test_s1_5_an_unhealthy_node_is_rebooted_once_and_examined",
            "tests/e2e/test_nodes.py::test_s1_3_s1_5_s1_6_a_sick_node_is_rebooted_once_and_proven",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    Mutant(
        row="S1.5",
        what="exit code 226 of a health check is read as healthy",
        file="relaunch/evidence/health.py",
        old="""        case "healthy":
""",
        new="""        case "healthy" | "inconclusive":
""",
        tests=(
            "tests/recovery/test_health.py::test_s1_5_a_health_check_by_exit_code_is_judged_when",
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_5_a_users_own_health_check_is_judged_by_exit_code",
        ),
    ),
    Mutant(
        row="S1.5",
        what="exit codes 0 and 1 of a health check are confused",
        file="relaunch/backends/ecs/examine.py",
        old="""            {0: "healthy", FAULTY: "faulty"}.get(code, "inconclusive")
""",
        new="""            {FAULTY: "healthy", 0: "faulty"}.get(code, "inconclusive")
""",
        tests=(
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_5_a_users_own_health_check_is_judged_by_exit_code",
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_5_a_fault_of_the_agents_task_needs_its_answer",
            "tests/backends/test_ecs_repairs.py"
            "::test_s1_5_with_only_a_health_check_the_node_restarts_once",
        ),
    ),
    Mutant(
        row="S1.5",
        what="GPUs are to be reset also where the node's platform resets none",
        file="relaunch/repair/escalation.py",
        old="""    if is_fixed_by_reset and escalation.can_reset and not escalation.tried:
""",
        new="""    if is_fixed_by_reset and not escalation.tried:
""",
        tests=(
            "tests/recovery/test_escalation.py::test_s1_5_a_node_that_cannot_be_reset_is_rebooted",
            "tests/workflows/test_escalation.py"
            "::test_s1_5_no_person_is_asked_for_a_reset_that_is_refused",
        ),
    ),
    Mutant(
        row="S1.5",
        what="a person is asked to approve a reset that would be refused",
        file="workflows/node_repair/workflow.py",
        old="""        if start.strategy is Strategy.RESET_GPU and terms.no_reset:
""",
        new="""\
        if start.strategy is Strategy.RESET_GPU and terms.no_reset and not terms.repairs:
""",
        tests=(
            "tests/workflows/test_escalation.py"
            "::test_s1_5_no_person_is_asked_for_a_reset_that_is_refused",
            "tests/e2e/test_ecs.py::test_s1_5_no_person_is_asked_for_a_reset_on_ecs",
        ),
    ),
    # --- S1.6: a proven reboot, then a launch as one retry
    Mutant(
        row="S1.6",
        what="a proven reboot is followed by no launch",
        file="relaunch/job/decide.py",
        old="""        case RepairEnded(outcome="done") if answers(job, event):
""",
        new="""        case RepairEnded(outcome="ambiguous") if answers(job, event):
""",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_6_a_proven_reboot_launches_again_as_one_retry",
            "tests/workflows/test_repair.py::test_s1_6_a_reboot_whose_answer_is_lost_happens_once",
            "tests/e2e/test_nodes.py::test_s1_3_s1_5_s1_6_a_sick_node_is_rebooted_once_and_proven",
            "tests/e2e/test_nodes.py::test_s1_6_s5_1_a_worker_killed_midway_repeats_nothing",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    Mutant(
        row="S1.6",
        what="the reboot of any node, and any other repair, counts as the one awaited",
        file="relaunch/job/decide.py",
        old="""    return event.strategy is job.tries[-1].strategy and set(event.nodes) == set(
        job.recovering.fault.nodes
    )
""",
        new="""    return True
""",
        tests=("tests/recovery/test_s1_ecs.py::test_s1_6_nothing_but_proof_ends_a_reboot",),
    ),
    Mutant(
        row="S1.6",
        what="after a reboot it is not awaited that the ECS agent is connected",
        file="relaunch/backends/ecs/repairs.py",
        old="""        if not instance.agent_connected:
            if entry.phase is not JournalPhase.DOWN and instance.status == "DRAINING":
""",
        new="""        if not instance.agent_connected and age >= HARD_RESET:
            if entry.phase is not JournalPhase.DOWN and instance.status == "DRAINING":
""",
        tests=(
            "tests/backends/test_ecs_repairs.py"
            "::test_s1_6_a_reboot_needs_a_new_boot_id_and_its_agent_back",
            "tests/backends/test_ecs_repairs.py"
            "::test_s1_6_a_worker_killed_as_a_node_returns_is_replaced",
            "tests/backends/test_ecs_repairs.py::test_s1_6_a_reboot_is_in_the_standby_of_its_group",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    Mutant(
        row="S1.6",
        what="a reboot is ordered without a word in the journal first",
        file="relaunch/backends/ecs/repairs.py",
        old="""        await journal.write(entry)
        await self._set_state(instance, "DRAINING")
""",
        new="""        await self._set_state(instance, "DRAINING")
""",
        tests=(
            "tests/backends/test_ecs_repairs.py"
            "::test_s1_6_a_worker_killed_between_two_calls_reboots_once",
        ),
    ),
    Mutant(
        row="S1.6",
        what="a node is rebooted while its Auto Scaling group has it in service",
        file="relaunch/backends/ecs/repairs.py",
        old="""        if member.state == IN_SERVICE:
""",
        new="""        if member.state == IN_SERVICE and entry.way is Way.POWER:
""",
        tests=(
            "tests/backends/test_ecs_repairs.py::test_s1_6_a_reboot_is_in_the_standby_of_its_group",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    Mutant(
        row="S1.6",
        what="a power cycle is over without a later launch time",
        file="relaunch/backends/ecs/power.py",
        old="""            case "running" if launch(machine.launched_at) == entry.before:
""",
        new="""            case "running" if launch(machine.launched_at) < entry.before:
""",
        tests=(
            "tests/backends/test_ecs_repairs.py"
            "::test_s1_6_without_node_task_a_launch_time_proves_the_restart",
        ),
    ),
    Mutant(
        row="S1.6",
        what="an examination that a dead worker began is not found again",
        file="relaunch/backends/ecs/examine.py",
        old="""                if task.started_by == started_by:
""",
        new="""                if task.started_by == started_by and task.stopped:
""",
        tests=(
            "tests/backends/test_ecs_node_tasks.py"
            "::test_s1_6_an_examination_of_a_dead_worker_is_found_untagged",
        ),
    ),
    Mutant(
        row="S1.6",
        what="an ECS agent that is not connected for long is no silence of its node",
        file="relaunch/backends/ecs/stream.py",
        old="""            if (silent := self._cluster.silent_for(instance.arn)) > AGENT_FLAPS:
""",
        new="""\
            if (silent := self._cluster.silent_for(instance.arn)) > 1000 * AGENT_FLAPS:
""",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_6_an_agent_away_briefly_is_no_news_but_then_silence",
        ),
    ),
    # --- S1.7: people are notified of every give-up and of every question
    Mutant(
        row="S1.7",
        what="a decision to give up does not say why",
        file="relaunch/job/ladder.py",
        old="""\
    return Stop(Phase.FAILED, f"{fault.reason}; {why}", exit_code=fault.exit_code or 1)
""",
        new="""    return Stop(Phase.FAILED, "it has failed", exit_code=fault.exit_code or 1)
""",
        tests=("tests/recovery/test_s1_ecs.py::test_s1_7_every_decision_to_give_up_says_why",),
    ),
    Mutant(
        row="S1.7",
        what="people are not notified of a job that is given up",
        file="workflows/training_job/notices.py",
        old="""    if job.phase is Phase.FAILED:
        return "failed"
""",
        new="",
        tests=(
            "tests/workflows/test_people.py::test_s1_7_people_are_notified_when_a_job_is_given_up",
            "tests/workflows/test_people.py"
            "::test_s1_7_people_hear_of_a_question_and_after_a_snooze_again",
            "tests/e2e/test_ecs.py::test_s1_5_s1_7_a_fault_on_healthy_nodes_fails_and_notifies",
        ),
    ),
    Mutant(
        row="S1.7",
        what="people are not notified of a question",
        file="workflows/training_job/notices.py",
        old="""        return None if job.snoozed else f"{ASKED}{job.generation} {job.next.at}"
""",
        new="""        return None
""",
        tests=(
            "tests/workflows/test_people.py"
            "::test_s1_7_people_hear_of_a_question_and_after_a_snooze_again",
        ),
    ),
    Mutant(
        row="S1.7",
        what="people are notified of every end of a job, also of a success",
        file="workflows/training_job/notices.py",
        old="""    if job.phase is Phase.FAILED:
        return "failed"
""",
        new="""    if job.phase.is_final:
        return "failed"
""",
        tests=(
            "tests/workflows/test_people.py"
            "::test_s1_7_a_job_that_succeeds_or_is_cancelled_sends_no_alert",
        ),
    ),
    Mutant(
        row="S1.7",
        what="a job sends its notices itself, and ends once they are delivered",
        file="workflows/training_job/notices.py",
        old="""        await tell_people(self._session.job.spec.fleet, (notice,), within)
""",
        new="""        from datetime import timedelta

        from relaunch.messages.notices import AddressedNotice, DeliverInput, Delivery

        delivery = Delivery(1, (AddressedNotice(notice),))
        await workflow.execute_activity(
            "deliver_notices",
            DeliverInput(self._session.job.spec.fleet, delivery),
            start_to_close_timeout=timedelta(minutes=1),
        )
""",
        tests=(
            "tests/workflows/test_people.py"
            "::test_s1_7_a_job_ends_also_when_no_person_can_be_notified",
        ),
    ),
    Mutant(
        row="S1.7",
        what="nothing is published to the SNS topic",
        file="relaunch/backends/ecs/sns.py",
        old="""        plain = plain_subject(subject)
        sent = {""",
        new="""        plain = plain_subject(subject)
        if plain:
            return
        sent = {""",
        tests=(
            "tests/backends/test_ecs_mirror.py::test_s1_7_people_are_notified_by_sns",
            "tests/e2e/test_ecs.py::test_s1_5_s1_7_a_fault_on_healthy_nodes_fails_and_notifies",
        ),
    ),
    # --- S1.8: the documented tables, by conditional writes
    Mutant(
        row="S1.8",
        what="the node table is deleted with the stack",
        file="deploy/ecs/relaunch.yaml",
        old="""  NodeTable:
    Type: AWS::DynamoDB::Table
    Condition: MakesTables
    DeletionPolicy: Retain
""",
        new="""  NodeTable:
    Type: AWS::DynamoDB::Table
    Condition: MakesTables
    DeletionPolicy: Delete
""",
        tests=(
            "tests/deploy/test_ecs_template.py"
            "::test_s1_8_tables_have_documented_keys_and_outlive_the_stack",
        ),
    ),
    Mutant(
        row="S1.8",
        what="the tasks of a job are in a column of another name",
        file="relaunch/backends/ecs/legacy_tables.py",
        old="""            "submitted_ecs_task_ids": row.tasks,
""",
        new="""            "ecs_task_ids": row.tasks,
""",
        tests=(
            "tests/backends/test_ecs_mirror.py"
            "::test_s1_8_rows_have_the_documented_attributes_and_formats",
            "tests/backends/test_ecs_mirror.py"
            "::test_s1_8_a_job_is_one_row_and_so_is_each_task_to_its_end",
        ),
    ),
    Mutant(
        row="S1.8",
        what="a late write replaces a newer row",
        file="relaunch/backends/ecs/legacy_tables.py",
        old="""        condition = "attribute_not_exists(#seq) OR #seq < :seq"
""",
        new="""        condition = "attribute_not_exists(#seq) OR #seq <> :seq"
""",
        tests=(
            "tests/backends/test_ecs_mirror.py"
            "::test_s1_8_writes_that_come_late_or_again_leave_the_newest",
            "tests/backends/test_ecs_mirror.py"
            "::test_s1_8_the_first_release_has_a_row_for_each_rank",
        ),
    ),
    Mutant(
        row="S1.8",
        what="the tables of the first release are not written",
        file="relaunch/backends/ecs/legacy_tables.py",
        old="""        if row.container_instance is None:
            return is_new
""",
        new="""        if row.container_instance is None or row.container_instance:
            return is_new
""",
        tests=(
            "tests/backends/test_ecs_mirror.py"
            "::test_s1_8_the_first_release_has_rows_by_container_instance",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    # --- S1.9: events are hints, and looks are the truth
    Mutant(
        row="S1.9",
        what="a hint has no rank looked at",
        file="workflows/training_job/watches.py",
        old="""        if self.running and not self._session.tasks.is_running(REPLACE):
""",
        new="""        if not self.running and not self._session.tasks.is_running(REPLACE):
""",
        tests=(
            "tests/workflows/test_people.py"
            "::test_s1_9_a_hint_has_ranks_looked_at_once_for_each_version",
        ),
    ),
    Mutant(
        row="S1.9",
        what="an event of a task that no watch here follows is dropped",
        file="activities/task_events.py",
        old="""        if queue.hint(event.what):
            return True
""",
        new="""        if queue.hint(event.what) or event.ended:
            return True
""",
        tests=(
            "tests/workflows/test_task_events.py"
            "::test_s1_9_an_event_leaves_the_queue_when_its_job_has_it",
        ),
    ),
    Mutant(
        row="S1.9",
        what="an event goes to its job also where a watch here follows the task",
        file="activities/task_events.py",
        old="""        if queue.hint(event.what):
            return True
""",
        new="""        queue.hint(event.what)
""",
        tests=(
            "tests/workflows/test_task_events.py"
            "::test_s1_9_events_of_followed_or_unknown_tasks_reach_no_job",
        ),
    ),
    Mutant(
        row="S1.9",
        what="an event is deleted although its job could not be told",
        file="activities/task_events.py",
        old="""        except TimeoutError:
            return False
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return True  # the job has ended
            log.warning(
                "the event of %s could not be sent to job %s and stays in the queue: %s",
                event.what,
                token.job,
                error,
            )
            return False
        return True
""",
        new="""        except (TimeoutError, RPCError) as error:
            log.warning("the event of %s is lost: %s", event.what, error)
        return True
""",
        tests=(
            "tests/workflows/test_task_events.py"
            "::test_s1_9_an_event_stays_queued_while_the_server_is_away",
        ),
    ),
    Mutant(
        row="S1.9",
        what="what AWS did not answer counts as refused",
        file="relaunch/backends/ecs/errors.py",
        old="""    if error.kind in (Kind.THROTTLED, Kind.UNAVAILABLE):
        raise Unreachable(node, error.reason) from error
""",
        new="",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_9_an_answer_that_aws_does_not_give_is_never_assumed",
        ),
    ),
    Mutant(
        row="S1.9",
        what="a hint at a followed task is not followed by a look",
        file="relaunch/backends/ecs/cluster.py",
        old="""        return self._follower.hint(arn)
""",
        new="""        return arn in self._follower._followed
""",
        tests=(
            "tests/backends/test_ecs.py::test_s1_9_a_task_that_is_hinted_at_is_looked_at_at_once",
        ),
    ),
    Mutant(
        row="S1.9",
        what="a task of which AWS says nothing has vanished",
        file="relaunch/backends/ecs/follow.py",
        old="""        self.failing = error
""",
        new="""        self.failing, self.missing = error, True
""",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_9_an_aws_that_does_not_answer_is_no_news_of_a_node",
        ),
    ),
    Mutant(
        row="S1.9",
        what="the end of a task that relaunch stopped itself is news",
        file="relaunch/backends/ecs/events.py",
        old="""        ended = detail.get("lastStatus") == STOPPED and not is_ours(
            str(detail.get("stoppedReason") or "")
        )
""",
        new="""        ended = detail.get("lastStatus") == STOPPED
""",
        tests=(
            "tests/backends/test_ecs_events.py::test_s1_9_an_event_is_read_for_what_it_hints_at",
        ),
    ),
    Mutant(
        row="S1.9",
        what="what is no event is taken for an event of another kind",
        file="relaunch/backends/ecs/events.py",
        old="""\
        raise ValueError(f"it is no event of EventBridge: {type(error).__name__} {error}") from None
""",
        new="""        log.warning("it is no event of EventBridge: %s", error)
        return None
""",
        tests=("tests/backends/test_ecs_events.py::test_s1_9_what_is_no_event_is_said_to_be_none",),
    ),
    Mutant(
        row="S1.9",
        what="an unreadable message is deleted like one that was passed on",
        file="relaunch/backends/ecs/events.py",
        old="""                log.warning(
                    "a message in the queue of fleet %s cannot be read: %s", self._fleet, error
                )
""",
        new="""                log.warning("a message cannot be read: %s", error)
                found.append(TaskMessage(message["ReceiptHandle"], None))
""",
        tests=(
            "tests/backends/test_ecs_events.py"
            "::test_s1_9_messages_stay_until_deleted_also_unreadable_ones",
        ),
    ),
    Mutant(
        row="S1.9",
        what="events alone say that a task has ended: nothing looks between them",
        file="relaunch/backends/ecs/cluster.py",
        old="""        self.poll = poll
""",
        new="""        poll *= 1000
        self.poll = poll
""",
        tests=(
            "tests/e2e/test_ecs.py::test_s1_9_lost_doubled_and_reordered_events_change_nothing",
        ),
    ),
    # --- S1.10: the same names are read
    Mutant(
        row="S1.10",
        what="the topic of the reference's settings is not read",
        file="relaunch/backends/ecs/options.py",
        old="""    "topic": "SNS_TOPIC_ARN",
""",
        new="""    "topic": "RELAUNCH_TOPIC_ARN",
""",
        tests=(
            "tests/backends/test_ecs_options.py"
            "::test_s1_10_names_of_the_reference_fill_gaps_of_the_file",
        ),
    ),
    Mutant(
        row="S1.10",
        what="the tables of the reference's settings are not read",
        file="relaunch/backends/ecs/options.py",
        old="""        name: environ.get(variable) or None
        if (written := getattr(given.tables, name)) is None
        else written
        for name, variable in TABLES.items()
""",
        new="""        name: getattr(given.tables, name)
        for name in TABLES
""",
        tests=(
            "tests/backends/test_ecs_options.py"
            "::test_s1_10_names_of_the_reference_fill_gaps_of_the_file",
            "tests/e2e/test_ecs.py::test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end",
        ),
    ),
    # --- S1.11: the retry count
    Mutant(
        row="S1.11",
        what="progress gives back the retry count",
        file="relaunch/spec/presets/ecs-reboot-once.toml",
        old="""renewal = "never"
""",
        new="""renewal = "progress"
""",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_11_only_a_person_gives_back_the_retry_count",
        ),
    ),
    Mutant(
        row="S1.11",
        what="every submission gives back the retry count",
        file="relaunch/job/apply.py",
        old="""    return _renew_budgets(job, now) if renew_budgets else job
""",
        new="""    return _renew_budgets(job, now)
""",
        tests=(
            "tests/recovery/test_s1_ecs.py::test_s1_11_only_a_person_gives_back_the_retry_count",
        ),
    ),
    Mutant(
        row="S1.11",
        what="a worker that takes over runs a task again that the dead one ran",
        file="relaunch/backends/ecs/launch.py",
        old="""        known = await self._cluster.task_of(ec2_id, build_started_by(token))
        # `task_of` has just read the instance too.
""",
        new="""        known = None
        request = {**request, "clientToken": client_token(str(time.monotonic()))}
""",
        tests=(
            "tests/backends/test_ecs.py"
            "::test_s1_11_a_worker_dead_at_any_effect_leaves_single_tasks",
        ),
    ),
)
