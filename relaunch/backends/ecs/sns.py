"""Publishes notifications to an Amazon SNS topic.

It does not decide who is notified of what, or when, and does not know whether a message is read.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from relaunch.backends.ecs.aws import Aws

LONGEST_SUBJECT = 99
"""Subjects of SNS are ASCII, without line breaks or control characters, and "less than 100
characters long" (API reference of Publish).
"""
LONGEST_MESSAGE = 262_144
"""Maximum bytes of body, subject and attributes together (SNS quotas); SNS refuses a larger message
as a whole.
"""
CUT = "\n[cut: a message of Amazon SNS has at most 256 KiB]"
_PLAIN = str.maketrans(
    {
        "…": "...",
        "–": "-",
        "—": "-",
        "→": "->",
        "×": "x",
        "·": "-",
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
    }
)


class Topic:
    def __init__(self, aws: Aws, arn: str) -> None:
        self._aws = aws
        self._arn = arn

    async def tell(
        self, subject: str, text: str, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message. A repeated call publishes a second message.

        Args:
            subject: Subject line for e-mail subscribers. It is shortened and converted as SNS
                requires.
            text: Body. A body that is too long is cut, and ends with a note that says so.
            attributes: Attributes by which subscriptions may filter. Empty values are left out,
                because SNS refuses them.

        Raises:
            AwsError: The message was not sent, or it is unknown whether it was.
        """
        plain = plain_subject(subject)
        sent = {name: value for name, value in (attributes or {}).items() if value}
        beside = len(plain) + sum(
            len(name.encode()) + len("String") + len(value.encode()) for name, value in sent.items()
        )
        await self._aws.call(
            "sns",
            "Publish",
            TopicArn=self._arn,
            Subject=plain,
            Message=fitting(text.strip() or plain, LONGEST_MESSAGE - beside),
            MessageAttributes={
                name: {"DataType": "String", "StringValue": value} for name, value in sent.items()
            },
        )


def plain_subject(text: str) -> str:
    """Return text as SNS accepts it for a subject.

    Accents are removed, other non-ASCII characters become question marks, and the end is cut.
    """
    split = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    bare = "".join(letter for letter in split if not unicodedata.combining(letter))
    ascii_only = bare.encode("ascii", "replace").decode()
    line = " ".join(
        "".join(letter if letter.isprintable() else " " for letter in ascii_only).split()
    )
    return (
        line
        if 0 < len(line) <= LONGEST_SUBJECT
        else f"{line[: LONGEST_SUBJECT - 3].rstrip()}..."
        if line
        else "relaunch"
    )


def fitting(text: str, most: int) -> str:
    """Return text cut to at most `most` bytes."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    return data[: max(0, most - len(CUT))].decode(errors="ignore") + CUT
