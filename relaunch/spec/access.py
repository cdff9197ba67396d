"""The `access:` section of a fleet file: people, their keys, and their rights."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from relaunch.fields import Name, StrictModel

Permission = Literal[
    "submit", "cancel", "retry", "answer", "policy", "drain", "pause", "repair", "declare-dead"
]
Right = Literal[
    "submit",
    "cancel",
    "cancel-own",
    "retry",
    "retry-own",
    "answer",
    "answer-own",
    "policy",
    "policy-own",
    "drain",
    "pause",
    "repair",
    "declare-dead",
]
"""A permission, or a permission for a person's own jobs alone."""

RESEARCHER: tuple[Right, ...] = ("submit", "cancel-own", "retry-own", "answer-own", "policy-own")
OPERATOR: tuple[Right, ...] = ("submit", "cancel", "retry", "answer", "policy", "drain", "pause")
ROLES: dict[str, tuple[Right, ...]] = {
    "researcher": RESEARCHER,
    "operator": OPERATOR,
    "admin": (*OPERATOR, "repair", "declare-dead"),
}
"""The roles that relaunch includes."""
KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)
MAX_KEY_LENGTH = 2000


def _check_key(value: str) -> str:
    """Validate a line of `~/.ssh/*.pub`; return its type and its key, without the comment."""
    if "PRIVATE KEY" in value:
        raise ValueError("it is a private key: expected the public one, the line of its .pub file")
    words = value.split()
    if len(words) < 2 or len(value) > MAX_KEY_LENGTH or words[0] not in KEY_TYPES:
        raise ValueError(
            f"{value[:40]!r} is not a public SSH key: expected a line such as"
            f" 'ssh-ed25519 AAAA… alice@laptop', of one of the types {', '.join(KEY_TYPES)}"
        )
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    name = words[0].encode()
    if not blob.startswith(len(name).to_bytes(4, "big") + name):
        raise ValueError(f"{value[:40]!r} is not a public SSH key: what follows its type is cut")
    return f"{words[0]} {words[1]}"


def _check_person(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9_])?", value):
        raise ValueError(
            f"{value[:60]!r} is not a person's name: 1 to 63 letters, digits, '.', '_' or '-',"
            " as their login name, without a host"
        )
    return value


PublicKey = Annotated[str, AfterValidator(_check_key)]
PersonName = Annotated[str, AfterValidator(_check_person)]


class Person(StrictModel):
    role: Name
    """Their role: researcher, operator, admin, or one of `roles`."""
    keys: tuple[PublicKey, ...] = Field(default=(), max_length=16)
    """Their public SSH keys, one of which signs their orders; without any they prove nothing."""


class Access(StrictModel):
    """Who may do what. Without this section everyone who reaches the server may do everything."""

    people: dict[PersonName, Person] = Field(min_length=1, max_length=1000)
    """The people, by login name."""
    roles: dict[Name, tuple[Right, ...]] = Field(default={}, max_length=100)
    """Roles beside those that relaunch includes, each with its rights."""
    others: Name | None = None
    """The role of everyone who is not in `people`; none: they may do nothing."""
    unproven: tuple[Right, ...] = RESEARCHER
    """The rights that a caller without a valid signature has, as far as their role has them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if taken := sorted(set(self.roles) & set(ROLES)):
            raise ValueError(
                f"role {taken[0]} is one that relaunch includes: expected another name in roles"
            )
        known = [*ROLES, *self.roles]
        given = [(f"people.{name}", person.role) for name, person in self.people.items()]
        given += [("others", self.others)] if self.others else []
        for where, role in given:
            if role not in known:
                raise ValueError(f"{where}: unknown role {role}: expected {', '.join(known)}")
        owners: dict[str, str] = {}
        for name, person in self.people.items():
            for key in person.keys:
                if owners.setdefault(key, name) != name:
                    raise ValueError(
                        f"{owners[key]} and {name} have the same key: expected one person for"
                        " each key"
                    )
        return self

    def rights_of(self, role: str | None) -> tuple[Right, ...]:
        """Return the rights of a role; none for no role."""
        return () if role is None else self.roles.get(role) or ROLES.get(role, ())

    def role_of(self, person: str) -> str | None:
        """Return the role of a person; None: they may do nothing."""
        known = self.people.get(person)
        return self.others if known is None else known.role

    def find_key_owner(self, key: str) -> str | None:
        """Return whose public key this is (`ssh-ed25519 AAAA…`); None: of no person here."""
        owners = (name for name, person in self.people.items() if key in person.keys)
        return next(owners, None)


RIGHTS: tuple[Right, ...] = get_args(Right)
