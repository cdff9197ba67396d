"""What hostile input is drawn from."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

from tests.hostile.liar import Grammar

SNIPPETS = (
    *("\x1b[2J", "\x1b[1;1H", "\x1b]0;title\x07", "\x1b]52;c;cm0=\x1b\\", "\x1b]8;;http://e/\x07x"),
    *(
        "\x1b[6n",
        "\x1b[c",
        "\x1b[>4;2m",
        "\x1b[?4m",
        "\x1b[8m",
        "\x1b[31m",
        "\x1b[38;5;8m",
        "\x1bc",
    ),
    *(
        "\x1b[0 m",
        "\x1b[?1049h",
        "\x1bP$qm\x1b\\",
        "\x1b(0",
        "\x9b2J",
        "\x9d0;t\x9c",
        "\x1b",
        "\x1b[",
    ),
    *("\r", "\n", "\x08", "\x07", "\x00", "\x7f", "\x85", "\x0b\x0c", "\u2028", "\u202e", "\u2066"),
    *("\u200b", "\ufeff", "\U000e0041", "\ud800", "\U0001f600", "e\u0301" * 9, "\xa0", "\u3000"),
    *("<script>alert(1)</script>", "<img src=x onerror=y>", "<!-- ", "&lt;", "&#60;b&#62;", "</a>"),
    *("[a](javascript:b)", "![a](http://e/x.png)", "[a]: http://e", "<http://e>", "]( ", "[a][b]"),
    *(
        "# h",
        "\n## h\n",
        "```",
        "\n```\n",
        "`",
        "**b**",
        "__b__",
        "~~s~~",
        "- ",
        "1. ",
        "> ",
        "|a|",
    ),
    *("\n===\n", "\n---\n", "\\", "\\[", "    code", "<!channel>", "@everyone", "@here", "<@U1>"),
    *("%s%n", "{0}", "${HOME}", "$(id)", "; id", "' OR 1", "../../etc/passwd", "~root", "-rf"),
    *(
        "NaN",
        "1e999",
        "9" * 400,
        "-0",
        "0x" + "f" * 40,
        "1_0",
        "null",
        "true",
        "~",
        "<<",
        "=",
        "*a",
    ),
    *("&a", "!!python/object:os.system", "? ", ": ", "{", "[", "}", "]", "'", '"', ",", "\t", "#"),
    *("{" * 40, "[" * 1500, '{"a":' * 1500, "- " * 60, "a" * 3000, "a, " * 900, "(" * 200),
    *("Traceback (most recent call last):\n", '  File "x.py", line 1, in f\n', "Error: x\n"),
    *(
        "NVRM: Xid (PCI:0000:05:00): 79, pid=1, x",
        "kernel: ",
        "[ 1.0] ",
        "10%|",
        "step 5",
        "[rank0]:",
    ),
)

hostile_text = st.lists(
    st.one_of(
        st.sampled_from(SNIPPETS),
        st.text(max_size=20),
        st.text("ab \n\t:-#[]{}'\"0123456789.", max_size=30),
    ),
    max_size=12,
).map("".join)
"""Texts of snippets that act somewhere, and of any characters, halves of surrogate pairs too."""

encodable_text = hostile_text.map(lambda text: text.encode("utf-8", "replace").decode())

numbers = st.one_of(
    st.integers(),
    st.sampled_from((0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64 + 1, 10**30, 10**400)),
    st.floats(),
)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, hostile_text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(hostile_text, inner, max_size=6)
    ),
    max_leaves=20,
)

lines = st.lists(hostile_text, max_size=30)


def mutated_json(*samples: Any) -> st.SearchStrategy[Any]:
    """Draw values like a sample, with some parts replaced by anything."""

    def mutate(seed: int, sample: Any, other: Any) -> Any:
        grammar = Grammar(seed)
        value = grammar.mutate(sample)
        return _put(grammar.random, value, other) if seed % 2 else value

    return st.one_of(
        st.builds(mutate, st.integers(0, 2**32), st.sampled_from(samples), json_values), json_values
    )


def _put(source: random.Random, value: Any, other: Any) -> Any:
    """Replace one part of a value, at any depth."""
    if isinstance(value, dict) and value:
        key = source.choice(sorted(value, key=repr))
        value[key] = _put(source, value[key], other) if source.random() < 0.6 else other
        return value
    if isinstance(value, list) and value:
        at = source.randrange(len(value))
        value[at] = _put(source, value[at], other) if source.random() < 0.6 else other
        return value
    return other


def mutated_text(*samples: str) -> st.SearchStrategy[str]:
    """Draw texts like a sample, with snippets put into it, and parts repeated or cut out."""

    @st.composite
    def draw(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(samples))
        for _ in range(draw(st.integers(0, 5))):
            at = draw(st.integers(0, len(text)))
            to = draw(st.integers(at, min(len(text), at + 40)))
            match draw(st.integers(0, 3)):
                case 0:
                    text = text[:at] + text[to:]
                case 1:
                    text = text[:at] + text[at:to] * draw(st.integers(2, 30)) + text[to:]
                case _:
                    text = text[:at] + draw(hostile_text) + text[to:]
        return text

    return st.one_of(draw(), hostile_text)


def dump(value: Any) -> bytes:
    """Write JSON as Python does, which also writes NaN and halves of surrogate pairs."""
    return json.dumps(value).encode()
