"""Tells people by Amazon SNS. Who is told what, and when, it does not know; nor whether anybody reads it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from relaunch.backends.ecs.aws import Aws

LONGEST_SUBJECT = 99
"""SNS: ASCII, no line breaks or control characters, and "less than 100 characters long" (API reference of Publish)."""
LONGEST_MESSAGE = 262_144
"""Bytes of body, subject and attributes together (SNS quotas); more is refused as a whole."""
CUT = "\n[cut: a message of Amazon SNS has at most 256 KiB]"
_PLAIN = str.maketrans({"…": "...", "–": "-", "—": "-", "→": "->", "×": "x", "·": "-", "‘": "'", "’": "'", "“": '"', "”": '"'})


class Topic:
    def __init__(self, aws: Aws, arn: str) -> None:
        self._aws = aws
        self._arn = arn

    async def tell(self, subject: str, text: str, attributes: Mapping[str, str] | None = None) -> None:
        """Publish. A repeated call is a second message.

        Args:
            subject: Of the e-mail, where a subscriber is one. It is made to fit.
            text: What cannot be sent of it is cut, and the message says so.
            attributes: That subscriptions may filter by. SNS refuses empty ones, so they are left out.

        Raises:
            AwsError: it was not sent, or nobody knows.
        """
        plain = plain_subject(subject)
        sent = {name: value for name, value in (attributes or {}).items() if value}
        beside = len(plain) + sum(len(name.encode()) + len("String") + len(value.encode()) for name, value in sent.items())
        await self._aws.call(
            "sns",
            "Publish",
            TopicArn=self._arn,
            Subject=plain,
            Message=fitting(text.strip() or plain, LONGEST_MESSAGE - beside),
            MessageAttributes={name: {"DataType": "String", "StringValue": value} for name, value in sent.items()},
        )


def plain_subject(text: str) -> str:
    """Text as SNS takes it for a subject: letters lose their accents, what has no ASCII is a question mark, and the end is cut."""
    split = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    bare = "".join(letter for letter in split if not unicodedata.combining(letter))
    ascii_only = bare.encode("ascii", "replace").decode()
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in ascii_only).split())
    return line if 0 < len(line) <= LONGEST_SUBJECT else f"{line[: LONGEST_SUBJECT - 3].rstrip()}..." if line else "relaunch"


def fitting(text: str, most: int) -> str:
    """Text of at most so many bytes."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    return data[: max(0, most - len(CUT))].decode(errors="ignore") + CUT
