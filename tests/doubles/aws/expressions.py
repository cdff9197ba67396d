"""The cluster query language of placement constraints and of ListContainerInstances.

As far as its page in the developer guide goes.

Source: docs.aws.amazon.com/AmazonECS/latest/developerguide/cluster-query-language.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.doubles.aws.values import ContainerInstance, invalid

_WORD = re.compile(
    r"""\s*(\(|\)|\[|\]|,|&&|\|\||==|!=|=~|!~|>=|<=|>|<|!(?=[\s(a-z])"""
    r"""|"[^"]*"|'[^']*'|[^\s()\[\],=!<>&|]+)"""
)
Test = Callable[[ContainerInstance], bool]


def parse(expression: str) -> Test:
    """Raise InvalidParameterException where ECS could not read it either."""
    return _Reader(expression).whole()


class _Reader:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._words = list(self._split(expression))
        self._at = 0

    def _split(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text.rstrip()):
            found = _WORD.match(text, at)
            if found is None:
                raise self._unreadable()
            yield found.group(1)
            at = found.end()

    def _unreadable(self) -> Exception:
        return invalid(f"Invalid expression: {self._expression}")

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self) -> str:
        if self._at == len(self._words):
            raise self._unreadable()
        self._at += 1
        return self._words[self._at - 1]

    def whole(self) -> Test:
        test = self._either()
        if self._peek():
            raise self._unreadable()
        return test

    def _either(self) -> Test:
        tests = [self._both()]
        while self._peek() in ("or", "||"):
            self._next()
            tests.append(self._both())
        return lambda instance: any(test(instance) for test in tests)

    def _both(self) -> Test:
        tests = [self._one()]
        while self._peek() in ("and", "&&"):
            self._next()
            tests.append(self._one())
        return lambda instance: all(test(instance) for test in tests)

    def _one(self) -> Test:
        word = self._next()
        if word in ("not", "!"):
            test = self._one()
            return lambda instance: not test(instance)
        if word == "(":
            test = self._either()
            if self._next() != ")":
                raise self._unreadable()
            return test
        return self._comparison(word)

    def _comparison(self, subject: str) -> Test:
        operator = self._next()
        if operator == "!" and self._peek() in ("exists", "in"):
            operator += self._next()
        if operator in ("exists", "!exists", "not_exists"):
            wanted = operator == "exists"
            return lambda instance: (
                (_subject(instance, subject, self._unreadable) is not None) is wanted
            )
        if operator in ("in", "!in", "not_in"):
            values = self._list()
            wanted = operator == "in"
            return lambda instance: (
                (_subject(instance, subject, self._unreadable) in values) is wanted
            )
        value = self._value(self._next())
        match operator:
            case "==" | "equals":
                return lambda instance: _subject(instance, subject, self._unreadable) == value
            case "!=" | "not_equals":
                return lambda instance: _subject(instance, subject, self._unreadable) != value
            case "=~" | "matches":
                return lambda instance: (
                    re.search(value, _subject(instance, subject, self._unreadable) or "")
                    is not None
                )
            case "!~" | "not_matches":
                return lambda instance: (
                    re.search(value, _subject(instance, subject, self._unreadable) or "") is None
                )
        raise self._unreadable()

    def _list(self) -> list[str]:
        if self._next() != "[":
            raise self._unreadable()
        values = [self._value(self._next())]
        while (word := self._next()) == ",":
            values.append(self._value(self._next()))
        if word != "]":
            raise self._unreadable()
        return values

    def _value(self, word: str) -> str:
        if word in ("(", ")", "[", "]", ","):
            raise self._unreadable()
        return word.strip("\"'")


def _subject(
    instance: ContainerInstance, subject: str, unreadable: Callable[[], Exception]
) -> str | None:
    if subject.startswith("attribute:"):
        told = {one["name"]: one.get("value", "") for one in instance.describe()["attributes"]}
        return told.get(subject.removeprefix("attribute:"))
    match subject:
        case "ec2InstanceId":
            return str(instance.machine.ec2_id)
        case "agentConnected":
            return str(instance.agent_connected).lower()
        case "runningTasksCount":
            return str(instance.describe()["runningTasksCount"])
    raise unreadable()
