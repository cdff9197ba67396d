"""Which tests of the contract run against nodes that are reached by SSH in `make long` only."""

from __future__ import annotations

import pytest

OF_THE_CONNECTION = (
    "test_a_rank_that_exits_is_seen_and_ends_its_neighbours",
    "test_a_watch_resumes_after_what_was_acknowledged",
    "test_a_stopped_generation_says_why_and_ends_its_watch",
    "test_a_node_that_is_cut_off_is_silent_and_its_ranks_run_on",
    "test_closing_leaves_the_ranks_running",
    "test_calls_at_the_same_time_do_not_hinder_each_other",
    "test_logs_are_read_on_from_an_offset_until_they_end",
    "test_s2_10_a_look_has_gpus_and_strangers_where_asked_to",
    "test_a_node_that_is_cut_off_answers_no_order_of_a_repair",
    "test_a_diagnosis_without_a_caller_ends_and_frees_the_node",
    "test_gpus_are_reset_only_on_the_boot_that_was_read",
    "test_a_reboot_gives_another_boot_id_and_is_in_the_journal",
)
"""The others are of the agent, which is the same over any connection, and a login to a real server
for each costs a second of a core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if (
            call is not None
            and str(call.params.get("make")).startswith("ssh")
            and getattr(item, "originalname", "") not in OF_THE_CONNECTION
        ):
            item.add_marker(pytest.mark.long)
