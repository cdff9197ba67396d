"""Who may do what, by the rules of a fleet file: every role, right and proof."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from pydantic import ValidationError

from relaunch.access.orders import (
    MAX_AGE,
    OrderVerdict,
    PersonOrder,
    Proof,
    RepairStep,
    SignedText,
    UsedProof,
    build_text,
    check_order,
    check_repair_step,
    read_signed,
)
from relaunch.access.signatures import SignatureError, verify
from relaunch.cli.app import app
from relaunch.pool.events import FleetFileContent, PauseCommand, ResumeCommand
from relaunch.spec.access import RESEARCHER, ROLES, Access, Permission
from tests.access.keys import make_key, read_public, sign, sign_order
from tests.access.table import (
    BY_OTHER_NAMES,
    COLUMNS,
    ROWS,
    UNCHECKED,
    find_cell,
    format_table,
    read_page,
)
from tests.recovery.fleet_builders import Desk

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"
)
NOW = datetime(2026, 11, 25, 3, 0, tzinfo=UTC)
PEOPLE = {"ada": "admin", "olaf": "operator", "rita": "researcher", "rob": "researcher"}
JOB_PERMISSIONS = ("cancel", "retry", "answer", "policy")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_key(folder, name) for name in PEOPLE}


def make_access(keys: dict[str, Path], **more: Any) -> Access:
    people = {
        name: {"role": role, "keys": [read_public(keys[name])]} for name, role in PEOPLE.items()
    }
    return Access.model_validate({"people": people, **more})


@pytest.fixture(scope="session")
def proofs(keys: dict[str, Path]) -> dict[str, SignedText]:
    """An order of each person, which they have signed."""
    return {
        name: sign_order(key, "fleet/gpus/r1", "pause", {"reason": "x"}, at=NOW, nonce=name)
        for name, key in keys.items()
    }


def expect(
    role: str | None, permission: str, *, is_own: bool, is_proven: bool, unproven: tuple[str, ...]
) -> bool:
    """What docs/access.md says, written down once more in other words."""
    rights: set[str] = set(ROLES[role]) if role else set()
    wanted = {permission} | ({f"{permission}-own"} if is_own else set())
    return bool(rights & wanted) and (is_proven or bool(set(unproven) & wanted))


@pytest.mark.parametrize("unproven", [RESEARCHER, (), ("repair", "cancel", "drain")])
def test_each_role_may_do_what_its_rights_say(
    keys: dict[str, Path], proofs: dict[str, SignedText], unproven: tuple[str, ...]
) -> None:
    access = make_access(keys, unproven=unproven)
    cells = 0
    for name, permission, is_proven in product(
        [*PEOPLE, "mallory", ""], get_args(Permission), (True, False)
    ):
        if is_proven and name not in PEOPLE:
            continue
        owners = [None] if permission not in JOB_PERMISSIONS else ["rita", "rob@host (claimed)"]
        for owner in owners:
            order = PersonOrder(
                permission,
                "do it",
                # A proven caller may say to be anyone.
                "root@node" if is_proven else f"{name}@laptop" if name else "",
                proofs[name] if is_proven else None,
                owner,
            )
            is_own = owner is not None and bool(name) and owner.startswith(name)
            wanted = expect(
                PEOPLE.get(name), permission, is_own=is_own, is_proven=is_proven, unproven=unproven
            )
            verdict = check_order(access, "gpus", order, NOW)
            assert (verdict.refusal == "") is wanted, (name, permission, is_proven, owner)
            shown = name if is_proven else f"{name}@laptop (claimed)" if name else None
            assert verdict.by == (shown or "an unnamed caller")
            assert not verdict.refusal or verdict.refusal.startswith(f"{verdict.by} may not do it")
            cells += 1
    assert cells == (5 + 4 * 2) * (4 * 2 + 2)


def test_the_table_of_the_page_is_that_of_the_rules() -> None:
    cells = {(row.title, column): find_cell(column, row) for row in ROWS for column in COLUMNS}
    assert format_table(cells) == read_page()


def test_each_command_is_in_the_table_or_takes_no_right() -> None:
    def list_commands(command: Any, name: str = "") -> Iterator[str]:
        for word, one in getattr(command, "commands", {}).items():
            yield from list_commands(one, f"{name} {word}".strip())
        if not hasattr(command, "commands") and not command.hidden:
            yield name

    ordered = {" ".join(one for one in row.words.split() if one.islower()) for row in ROWS}
    ordered = {one.partition(" --")[0].removesuffix(" deny") for one in ordered}
    commands = set(list_commands(typer.main.get_command(app)))
    known = {one.removesuffix(" approve") for one in ordered} | UNCHECKED | {*BY_OTHER_NAMES}
    assert commands == known


def test_without_rules_everyone_may_do_everything_under_any_name() -> None:
    order = PersonOrder("repair", "reboot n2", "anyone@anywhere")
    assert check_order(None, "gpus", order, NOW) == OrderVerdict("anyone@anywhere")


def test_sentences(keys: dict[str, Path], proofs: dict[str, SignedText], page: Any) -> None:
    access = make_access(
        keys, roles={"nights": ["drain", "repair"]}, others="researcher", unproven=["submit"]
    )
    orders = [
        PersonOrder("repair", "reboot n2", "rita@laptop", proofs["rita"]),
        PersonOrder("repair", "reboot n2", "ada@laptop"),
        PersonOrder("repair", "reboot n2", ""),
        PersonOrder("cancel", "cancel job train", "rob@laptop", None, "rita"),
        PersonOrder("cancel", "cancel job train", "rob@laptop", proofs["rob"], "rita@laptop"),
        PersonOrder("cancel", "cancel job train", "rita@laptop", None, "rita"),
        PersonOrder("drain", "drain n2", "mallory (claimed)"),
    ]
    refusals = [check_order(access, "gpus", order, NOW).refusal for order in orders]
    late = check_order(access, "gpus", orders[0], NOW + timedelta(minutes=12)).refusal
    empty = Access.model_validate({"people": {"rita": {"role": "researcher"}}})
    alone = check_order(empty, "gpus", orders[1], NOW).refusal
    assert all([*refusals, late, alone])
    assert "\n".join([*refusals, late, alone]) + "\n" == page


def test_a_signature_counts_once_and_for_minutes_only(
    keys: dict[str, Path], proofs: dict[str, SignedText]
) -> None:
    access = make_access(keys)
    order = PersonOrder("pause", "pause repairs", "ada@laptop", proofs["ada"])

    def try_at(now: datetime, used: tuple[UsedProof, ...] = ()) -> OrderVerdict:
        return check_order(access, "gpus", order, now, used)

    first = try_at(NOW)
    assert first.refusal == "" and len(first.used) == 1
    again = try_at(NOW + timedelta(seconds=1), first.used)
    assert "was used before" in again.refusal and again.used == first.used
    for away in (MAX_AGE, -MAX_AGE):
        assert try_at(NOW + away).refusal == ""
        assert "it was signed" in try_at(NOW + away * 1.01).refusal
    # It is remembered for as long as it could be used: also one from a clock that is ahead.
    assert first.used[0].until >= NOW + 2 * MAX_AGE
    other = PersonOrder("pause", "pause repairs", "", proofs["olaf"])
    assert len(check_order(access, "gpus", other, NOW, first.used).used) == 2
    later = NOW + 3 * MAX_AGE
    assert check_order(access, "gpus", replace(order, signed=None), later, first.used).used == ()


FIELDS = {"node": "n2", "reason": "a fan", "drain": False}


@pytest.mark.parametrize(
    ("changed", "is_valid"),
    [
        ({}, True),
        ({"fields": {**FIELDS, "by": "bob", "proof": {"x": 1}}}, True),
        ({"fields": {**FIELDS, "node": "n3"}}, False),
        ({"fields": {**FIELDS, "drain": True}}, False),
        ({"fields": {**FIELDS, "within": "1h"}}, False),
        ({"receiver": "fleet/gpus/r2"}, False),
        ({"receiver": "fleet/other/r1"}, False),
        ({"namespace": "production"}, False),
        ({"order": "release"}, False),
        ({"at": NOW + timedelta(seconds=1)}, False),
        ({"nonce": "n-2"}, False),
    ],
)
def test_a_signature_is_of_one_order_alone(
    keys: dict[str, Path], changed: dict[str, Any], is_valid: bool
) -> None:
    stated = {
        "receiver": "fleet/gpus/r1",
        "order": "quarantine",
        "fields": FIELDS,
        "at": NOW,
        "nonce": "n-1",
        "namespace": "default",
    }
    proof = sign_order(keys["ada"], **stated).proof  # type: ignore[arg-type]
    now = {**stated, **changed}
    message = {**now["fields"], "proof": {**proof.model_dump()}}  # type: ignore[dict-item]
    message["proof"] |= {"at": now["at"].isoformat(), "nonce": now["nonce"]}  # type: ignore[attr-defined]
    signed = read_signed(now["namespace"], now["receiver"], now["order"], message)  # type: ignore[arg-type]
    order = PersonOrder("repair", "reboot n2", "", signed)
    verdict = check_order(make_access(keys), "gpus", order, NOW)
    assert (verdict.refusal == "") is is_valid


def test_a_fleet_obeys_a_signature_once(
    keys: dict[str, Path], proofs: dict[str, SignedText]
) -> None:
    desk = Desk()
    desk.now = NOW
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=make_access(keys)))
    desk.go(PauseCommand("new switch", "mallory", signed=proofs["ada"]))
    assert desk.state.breaker.paused.startswith("ada:"), "who signed it, not who it says"
    (used,) = desk.state.used_proofs
    desk.go(ResumeCommand("done", "mallory", signed=proofs["olaf"]))
    assert not desk.state.breaker.paused and desk.state.used_proofs[0] == used
    desk.go(PauseCommand("new switch", "mallory", signed=proofs["ada"]))
    assert not desk.state.breaker.paused
    assert "refused: mallory (claimed) may not pause repairs" in desk.state.notices[-1]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"proof": {"at": 7, "nonce": [], "signature": None}}, id="types"),
        pytest.param({"proof": "x" * 10_000}, id="text"),
        pytest.param(
            {"proof": {"at": "", "nonce": "", "signature": ""}, "until": 10**5000}, id="number"
        ),
        pytest.param([1], id="list"),
    ],
)
def test_a_hostile_message_has_no_proof(message: Any) -> None:
    """An error here would fail the task of the workflow that receives it, for ever."""
    assert read_signed("default", "fleet/gpus/r1", "pause", message) is None


def test_a_key_that_the_file_does_not_name_proves_nothing(
    keys: dict[str, Path], tmp_path: Path
) -> None:
    stranger = make_key(tmp_path, "stranger")
    signed = sign_order(stranger, "fleet/gpus/r1", "pause", {}, at=NOW)
    order = PersonOrder("pause", "pause repairs", "ada@laptop", signed)
    refusal = check_order(make_access(keys), "gpus", order, NOW).refusal
    assert "a key that the fleet file does not name" in refusal


@pytest.mark.parametrize(
    ("kind", "more"),
    [("ed25519", ()), ("ecdsa", ("-b", "256")), ("ecdsa", ("-b", "521")), ("rsa", ("-b", "2048"))],
)
def test_signatures_of_ssh_keygen_are_verified(
    tmp_path: Path, kind: str, more: tuple[str, ...]
) -> None:
    key = make_key(tmp_path, "ada", kind, *more)
    public = " ".join(read_public(key).split()[:2])
    signature = sign(key, "an order")
    assert verify(signature, b"an order") == public
    with pytest.raises(SignatureError):
        verify(signature, b"another order")
    with pytest.raises(SignatureError, match="not made for relaunch"):
        verify(sign(key, "an order", "git"), b"an order")


def test_no_changed_byte_of_a_signature_is_accepted(keys: dict[str, Path]) -> None:
    data = bytearray(base64.b64decode(sign(keys["ada"], "an order")))
    public = verify(base64.b64encode(data).decode(), b"an order")
    for at in range(len(data)):
        changed = bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :])
        try:
            found = verify(base64.b64encode(changed).decode(), b"an order")
        except SignatureError:
            continue
        raise AssertionError(f"byte {at} was changed, and {found} == {public} accepted")
    for end in range(len(data)):
        with pytest.raises(SignatureError):
            verify(base64.b64encode(data[:end]).decode(), b"an order")


@pytest.mark.parametrize("signature", ["", "!", "AAAA", "A" * 5000, "U1NIU0lH"])
def test_what_is_no_signature_is_refused(signature: str) -> None:
    with pytest.raises(SignatureError):
        verify(signature, b"an order")


def test_the_text_of_an_order_is_canonical() -> None:
    one = build_text("ns", "fleet/gpus", "pause", {"a": 1, "b": "é"}, "t", "n")
    other = build_text("ns", "fleet/gpus", "pause", {"b": "é", "a": 1}, "t", "n")
    assert one == other and one.isascii()


@pytest.mark.parametrize(
    "at", ["", "yesterday", "2026-11-25T03:00:00", "9999-12-31T23:59:59+00:00"]
)
def test_a_signature_without_a_usable_time_proves_nothing(keys: dict[str, Path], at: str) -> None:
    signed = SignedText("text", Proof(at=at, nonce="n", signature="AAAA"))
    order = PersonOrder("repair", "reboot n2", "ada", signed)
    assert check_order(make_access(keys), "gpus", order, NOW).refusal


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJ5b3BocGxvZ2dlcmNvbnNvbGVjb25zb2xlMTIz ada@laptop"


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"people": {}}, "at least 1 item"),
        ({"people": {"ada": {"role": "boss"}}}, "unknown role boss"),
        ({"people": {"ada": {"role": "admin"}}, "others": "boss"}, "others: unknown role boss"),
        ({"people": {"ada@laptop": {"role": "admin"}}}, "not a person's name"),
        ({"people": {"ada": {"role": "admin", "keys": ["ssh-dss AAAA"]}}}, "not a public SSH key"),
        ({"people": {"ada": {"role": "admin", "keys": ["ssh-ed25519 !"]}}}, "is cut"),
        (
            {"people": {"ada": {"role": "admin", "keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}}},
            "it is a private key",
        ),
        (
            {
                "people": {
                    "ada": {"role": "admin", "keys": [KEY]},
                    "bob": {"role": "admin", "keys": [KEY.replace("ada@", "bob@")]},
                }
            },
            "ada and bob have the same key",
        ),
        (
            {"people": {"ada": {"role": "admin"}}, "roles": {"admin": ["drain"]}},
            "role admin is one that relaunch includes",
        ),
        ({"people": {"ada": {"role": "admin"}}, "unproven": ["reboot"]}, "Input should be"),
    ],
)
def test_a_bad_section_is_one_sentence(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Access.model_validate(section)


def test_an_own_role_has_its_rights(keys: dict[str, Path], proofs: dict[str, SignedText]) -> None:
    access = Access.model_validate(
        {
            "people": {"ada": {"role": "nights", "keys": [read_public(keys["ada"])]}},
            "roles": {"nights": ["drain", "repair"]},
        }
    )
    for permission in get_args(Permission):
        order = PersonOrder(permission, "do it", "", proofs["ada"])
        verdict = check_order(access, "gpus", order, NOW)
        assert (verdict.refusal == "") is (permission in ("drain", "repair"))


def test_a_name_cannot_act_on_a_terminal_or_fill_a_page() -> None:
    order = PersonOrder("repair", "reboot n2", "\x1b[2J\r\nada\u202e@" + "x" * 5000)
    access = Access.model_validate({"people": {"ada": {"role": "admin"}}})
    verdict = check_order(access, "gpus", order, NOW)
    assert verdict.by.isprintable() and verdict.refusal.isprintable()
    assert len(verdict.by) < 100 and verdict.by.endswith(" (claimed)")


STEP = RepairStep("reboot", "gpus", "n2", "default", "repair/gpus/n2", "run-1")
ORDERED = {"fleet": "gpus", "node": "n2", "strategy": "REBOOT_NODE", "power": False}


def test_a_worker_does_to_a_node_only_what_was_signed_for_it(
    keys: dict[str, Path],
) -> None:
    access = make_access(keys)
    answered = "repair/gpus/n2/run-1"

    def sign_as(
        who: str, receiver: str = "repair/gpus/n2", order: str = "NodeRepair", **fields: Any
    ) -> SignedText:
        said = fields if order == "answer" else {**ORDERED, **fields}
        return sign_order(keys[who], receiver, order, said, at=NOW, namespace="default")

    def check(signed: SignedText | None, now: datetime = NOW, **step: Any) -> str:
        return check_repair_step(access, replace(STEP, **step), signed, now)

    ada = sign_as("ada")
    approves = {"decision": "approve", "repair": "reboot"}
    approval = sign_as("ada", answered, "answer", **approves)
    late = NOW + timedelta(hours=3)
    assert check(ada) == check(ada, late) == check(approval) == ""
    assert check(sign_as("ada", strategy=None), verb="reset-gpus") == ""
    assert check(sign_as("ada", power=True), verb="power-cycle") == ""
    refused = {
        "no signed order": check(None),
        "rita may not repair": check(sign_as("rita")),
        "olaf may not repair": check(sign_as("olaf", answered, "answer", **approves)),
        "is not valid: it is not one of this order": check(
            replace(ada, text=ada.text.replace("n2", "n3")), node="n3", workflow="repair/gpus/n3"
        ),
        "expected repair/gpus/n2": check(ada, workflow="repair/gpus/n9"),
        "expected at most 4 h": check(ada, NOW + timedelta(hours=5)),
    }
    # What is signed is `[1]`: a signature of it proves a person, and orders nothing.
    refused["is no order"] = check(
        SignedText("[1]", Proof(at="", nonce="", signature=sign(keys["ada"], "[1]")))
    )
    for words, refusal in refused.items():
        assert words in refusal and refusal.startswith("reboot of n"), (words, refusal)
    others = [
        check(ada, verb="reset-gpus"),
        check(ada, verb="power-cycle"),
        check(ada, node="n3", workflow="repair/gpus/n3"),
        check(ada, fleet="other", workflow="repair/other/n2"),
        check(ada, namespace="second"),
        check(approval, run="run-2"),
        check(approval, verb="power-cycle"),
        check(sign_as("ada", answered, "answer", decision="approve")),
        check(sign_as("ada", answered, "answer", decision="deny")),
        check(sign_as("ada", "fleet/gpus/r", "pause")),
    ]
    assert all("ada has signed another order" in refusal for refusal in others), others
    # Where the file lets callers repair who prove nothing, there is nothing to check.
    lax = make_access(keys, unproven=["repair"])
    assert check_repair_step(lax, STEP, None, NOW) == ""
