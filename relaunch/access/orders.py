"""Whether the caller of an order may give it, by a fleet's rules.

Computes only: the same order, rules, time and used signatures give the same verdict, so a workflow
that is replayed decides as before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from relaunch.access.signatures import SignatureError, verify
from relaunch.fields import StrictModel, duration
from relaunch.spec.access import Access, Permission, Right
from relaunch.spec.policy import RepairKind
from relaunch.text import join_names

MAX_AGE = timedelta(minutes=5)
"""How much the time at which an order was signed may differ from that of the server: two clocks,
and a server that is slow to take it."""
REPAIR_PROOF_LIFETIME = timedelta(hours=4)
"""How long a fleet knows which repair a signature has ordered: each repair is a workflow of its
own, and knows of no other."""
REPAIR_ORDER, REPAIR_ANSWER = "NodeRepair", "answer"
"""What a person signs who orders a repair, and who approves one."""
MAX_BY = 80
"""Characters of a caller's name that are kept."""
UNNAMED = "an unnamed caller"
CLAIMED = " (claimed)"
OWN_SUFFIX = "-own"
REFUSED = "refused: "
"""Begins the notice of a refusal."""
MAX_SIGNED = 64 * 1024
"""Characters of a signed text."""


class Proof(StrictModel):
    """What `relaunch` adds to an order where $RELAUNCH_SSH_KEY names a key."""

    at: str
    """When it was signed, as ISO 8601."""
    nonce: str
    """Makes each order a different one: the same signature is accepted once."""
    signature: str
    """Of `ssh-keygen -Y sign -n relaunch`, without the lines around it."""


@dataclass(frozen=True, slots=True)
class SignedText:
    """The text of an order as its receiver has built it, and what is to prove who signed it."""

    text: str
    proof: Proof


@dataclass(frozen=True, slots=True)
class UsedProof:
    """A signature that was accepted, until it is too old to be accepted anyway."""

    nonce: str
    until: datetime
    run: str = ""
    """The run of the repair that it has ordered."""


@dataclass(frozen=True, slots=True)
class PersonOrder:
    """What a person asks of a fleet, a repair or a job."""

    permission: Permission
    what: str
    """What they ask, as it follows `may not`: `reboot node n2`."""
    by: str
    """Who it is, as they say."""
    signed: SignedText | None = None
    owner: str | None = None
    """For an order to a job: who submitted it. None: the order is none to a job."""


@dataclass(frozen=True, slots=True)
class OrderVerdict:
    by: str
    """The caller for people: `alice` if that is proven, else `alice@laptop (claimed)`."""
    refusal: str = ""
    """Why the order is refused, in one sentence; empty: it is allowed."""
    used: tuple[UsedProof, ...] = ()
    """The signatures that must not be accepted again."""


def build_text(
    namespace: str, workflow: str, order: str, fields: Mapping[str, Any], at: str, nonce: str
) -> str:
    """Return the text that is signed for an order.

    It names the receiver, so that a signature for one fleet, node or job is none for another, and
    none for a later submission of the same job.

    Args:
        namespace: Of the Temporal server.
        workflow: The workflow that receives the order: its id, and its first run where it runs
            already (`fleet/gpus/FIRST_RUN_ID`). An order that starts a workflow has the id alone.
        order: The name of the signal, update or workflow.
        fields: The message without `by` and `proof`, as JSON.
        at: When it was signed.
        nonce: The nonce of its proof.
    """
    content = {
        "relaunch": 1,
        "namespace": namespace,
        "workflow": workflow,
        "order": order,
        "fields": {key: value for key, value in fields.items() if key not in ("by", "proof")},
        "at": at,
        "nonce": nonce,
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def read_signed(namespace: str, workflow: str, order: str, message: Any) -> SignedText | None:
    """Return what a message says that was signed; None: it has no proof, or none of that form.

    Args:
        namespace: Of the Temporal server.
        workflow: The workflow that has received it, as in `build_text`.
        order: The name of the signal, update or workflow.
        message: The message as it has arrived: signatures are longer than other texts may be.
    """
    if not isinstance(message, Mapping) or not message.get("proof"):
        return None
    try:
        proof = Proof.model_validate(message["proof"])
        text = build_text(namespace, workflow, order, message, proof.at, proof.nonce)
    except ValueError:  # also of a number with more digits than Python prints
        return None
    return SignedText(text, proof)


def check_order(
    access: Access | None,
    fleet: str,
    order: PersonOrder,
    now: datetime,
    used: tuple[UsedProof, ...] = (),
) -> OrderVerdict:
    """Return whether the caller may give an order, and who they are.

    Args:
        access: The rules of the fleet file; None: it has none, and everyone may do everything.
        fleet: The fleet's name, for sentences.
        order: What is asked.
        now: The time of the workflow.
        used: Signatures that were accepted before.
    """
    if access is None:
        return OrderVerdict(order.by, used=used)
    used = tuple(one for one in used if one.until > now)
    person, wrong = _prove(access, order.signed, now, used)
    if person is not None:
        assert order.signed is not None
        used = (*used, UsedProof(order.signed.proof.nonce, now + 2 * MAX_AGE))
    name = person or strip_caller(order.by)
    caller = person or describe_claimed(order.by)
    wanted = _list_sufficient(order, name)
    rights = access.rights_of(access.role_of(name) if name else access.others)
    if not _has(rights, wanted):
        return OrderVerdict(caller, _refuse(access, fleet, order, caller, wanted, wrong), used)
    if person is None and not _has(access.unproven, wanted):
        proof = wrong or "the order is not signed: set RELAUNCH_SSH_KEY to your SSH key"
        refusal = f"{caller} may not {order.what} without proof of who they are: {proof}"
        return OrderVerdict(caller, refusal, used)
    return OrderVerdict(caller, used=used)


@dataclass(frozen=True, slots=True)
class RepairStep:
    """What a worker is to do to a node, and the repair that orders it."""

    verb: RepairKind
    fleet: str
    node: str
    namespace: str
    workflow: str
    run: str
    """Workflow and run as the server states them to the worker."""


STRATEGIES: Mapping[RepairKind, str] = {
    "reset-gpus": "RESET_GPU",
    "reboot": "REBOOT_NODE",
    "power-cycle": "REBOOT_NODE",
}


def check_repair_step(
    access: Access, step: RepairStep, signed: SignedText | None, now: datetime
) -> str:
    """Return why no person has ordered or approved a step of a repair; empty: one has.

    The workflow has checked the same before it asked. A worker that is asked cannot know whether
    it was relaunch's workflow that did: everyone who may write to the namespace can run another
    under its name.

    Args:
        access: The rules of the fleet file.
        step: What is to be done.
        signed: The order or the approval that the repair has received.
        now: The time by this machine's clock.
    """
    if "repair" in access.unproven:
        return ""
    what = f"{step.verb} of {step.node} is not done by this worker"
    if signed is None:
        return f"{what}: no signed order or approval came with it"
    try:
        if len(signed.text) > MAX_SIGNED:
            raise SignatureError("it signs too long a text")
        key = verify(signed.proof.signature, signed.text.encode())
        content = json.loads(signed.text)
        age = now - datetime.fromisoformat(content["at"])
        fields, order = content["fields"], content["order"]
        receiver = content["namespace"], content["workflow"]
        said = fields.get("fleet"), fields.get("node"), fields.get("strategy")
    except SignatureError as error:
        return f"{what}: the signature of its order is not valid: {error}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{what}: the text that was signed is no order"
    person = access.find_key_owner(key)
    if person is None or "repair" not in access.rights_of(access.role_of(person)):
        return f"{what}: {person or 'the owner of an unknown key'} may not repair"
    workflow = f"repair/{step.fleet}/{step.node}"
    if step.workflow != workflow:
        return f"{what}: it was ordered by {step.workflow}, expected {workflow}"
    if order == REPAIR_ANSWER:
        is_of_it = receiver == (step.namespace, f"{workflow}/{step.run}")
        is_of_it = is_of_it and fields.get("decision") == "approve"
        is_of_it = is_of_it and fields.get("repair") == step.verb
    else:
        # Without a strategy the examination chooses it.
        is_of_it = order == REPAIR_ORDER and receiver == (step.namespace, workflow)
        is_of_it = is_of_it and said[:2] == (step.fleet, step.node)
        is_of_it = is_of_it and said[2] in (None, STRATEGIES[step.verb])
        if step.verb == "power-cycle" and said[2] is not None:
            is_of_it = is_of_it and fields.get("power") is True
    if not is_of_it:
        return f"{what}: {person} has signed another order"
    if abs(age) > REPAIR_PROOF_LIFETIME:
        days = duration(timedelta(seconds=int(abs(age).total_seconds())))
        return f"{what}: {person} has signed it {days} ago, expected at most 4 h"
    return ""


def describe_claimed(by: str) -> str:
    """Return a caller who has proven nothing, for people."""
    name = clean_name(by).removesuffix(CLAIMED)
    return f"{name}{CLAIMED}" if name else UNNAMED


def clean_name(by: str) -> str:
    """Return what a caller says to be, without what could act on a terminal or fill a page."""
    return "".join(char for char in by[: 2 * MAX_BY] if char.isprintable())[:MAX_BY]


def strip_caller(by: str) -> str:
    """Return the person of a caller: `alice` for `alice@laptop` and `alice@laptop (claimed)`."""
    return by.removesuffix(CLAIMED).partition("@")[0].strip()


def _prove(
    access: Access, signed: SignedText | None, now: datetime, used: tuple[UsedProof, ...]
) -> tuple[str | None, str]:
    """Return who is proven to have signed; or None, and what is wrong with the signature."""
    if signed is None:
        return None, ""
    proof = signed.proof
    try:
        at = datetime.fromisoformat(proof.at)
        away = abs(now - at)
    except (ValueError, TypeError, OverflowError):
        return None, "the time of its signature is not one with a zone, as ISO 8601"
    if away > MAX_AGE:
        when = f"{duration(timedelta(seconds=int(away.total_seconds())))} {_side(at, now)}"
        return None, (
            f"it was signed {when}, by its clock, and a signature is good for"
            f" {duration(MAX_AGE)}; give the order again"
        )
    if not proof.nonce or len(proof.nonce) > 64 or len(signed.text) > MAX_SIGNED:
        return None, "its signature has no nonce of 1 to 64 characters, or signs too long a text"
    if any(one.nonce == proof.nonce for one in used):
        return None, "its signature was used before; give the order again"
    try:
        key = verify(proof.signature, signed.text.encode())
    except SignatureError as error:
        return None, f"its signature is not valid: {error}"
    owner = access.find_key_owner(key)
    if owner is None:
        return None, "it was signed with a key that the fleet file does not name"
    return owner, ""


def _side(at: datetime, now: datetime) -> str:
    return "ago" if at < now else "in the future"


def _list_sufficient(order: PersonOrder, person: str) -> tuple[Right, ...]:
    """Return the rights of which each suffices for the order."""
    permission: Right = order.permission
    if order.owner is None or not person or strip_caller(order.owner) != person:
        return (permission,)
    own: Right = f"{order.permission}{OWN_SUFFIX}"  # type: ignore[assignment]
    return permission, own


def _has(rights: tuple[Right, ...], wanted: tuple[Right, ...]) -> bool:
    return any(right in rights for right in wanted)


def _refuse(
    access: Access,
    fleet: str,
    order: PersonOrder,
    caller: str,
    wanted: tuple[Right, ...],
    wrong: str,
) -> str:
    """Return the sentence for a caller whose role lacks the right: which would do, and who has
    it."""
    people = [
        name
        for name, person in access.people.items()
        if _has(access.rights_of(person.role), wanted)
    ]
    roles = dict.fromkeys(access.people[name].role for name in people)
    of_whom = (
        f" of {strip_caller(order.owner) or 'an unnamed submitter'}"
        if order.owner is not None
        else ""
    )
    right = f"{wanted[0]!r}"
    needs = f"in fleet {fleet} that takes the right {right}"
    if not people:
        has = ", which no person has"
    else:
        verb = "role {} has" if len(roles) == 1 else "roles {} have"
        has = f", which {verb.format(join_names(roles))} ({join_names(people)})"
    also = f"; {wrong}" if wrong else ""
    return f"{caller} may not {order.what}{of_whom}: {needs}{has}{also}"
