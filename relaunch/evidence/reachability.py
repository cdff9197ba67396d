"""Judge which nodes of a gang cannot reach each other, and which of them is at fault.

Which nodes call which is chosen here as well. A call goes over the job's network, to ports such as
ranks use, and succeeds when a full-size packet came back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relaunch.text import count_noun, join_names

ALL_PAIRS_UP_TO = 16
"""Number of nodes up to which each calls every other. In larger gangs each calls those that are 1,
2, 4, … places away in both directions, which are the neighbours of rings and trees: 21 calls per
node in a gang of 2,048, where all pairs were 4 million."""
MAX_LINKS = 16
"""Most broken links that are kept; more than a person reads."""
NAMED = 4
MIN_PEERS = 2
"""Peers that a node must fail with to be at fault by itself: with one, it may be either."""

LINK = "link"
"""The code of a fault of two nodes of which either may be at fault."""
NODE_LINK = "node_link"
"""The code of a fault of nodes that fail with several others."""
CUT_OFF = "cut_off"
"""The code of a hang in which nothing is acknowledged on a connection between two ranks."""


@dataclass(frozen=True, slots=True)
class LinkCall:
    """One call from one node to another."""

    caller: str
    target: str
    problem: str = ""
    """A clause that says why it failed; empty: it was answered."""


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """Two nodes of which at least one cannot call the other."""

    nodes: tuple[str, str]
    """In the order of their places in the gang."""
    problem: str
    """A clause that says why the first failed call failed."""
    one_way: str = ""
    """The node that cannot call the other, while the other can call it. Empty: neither can, or the
    other direction is not known."""


@dataclass(frozen=True, slots=True)
class LinkFindings:
    """What was found out about the links of a gang."""

    reason: str
    """A clause for people."""
    suspects: tuple[str, ...] = ()
    """Nodes to replace; empty: no link is broken, or no node is more at fault than the others."""
    proven: bool = False
    """Whether each suspect fails with several nodes that reach others, so that it is at fault by
    itself. If not, a suspect is one of a pair, and it may be the other."""
    broken: tuple[BrokenLink, ...] = ()
    dropped: int = 0
    """Number of broken links that are not kept."""

    @property
    def code(self) -> str:
        return NODE_LINK if self.proven else LINK


def choose_calls(count: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each place of a gang of `count` nodes, the places that its node calls."""
    if count <= ALL_PAIRS_UP_TO:
        return tuple(
            tuple(other for other in range(count) if other != place) for place in range(count)
        )
    distances = [1 << power for power in range((count - 1).bit_length())]
    return tuple(
        tuple(
            dict.fromkeys(
                other
                for distance in distances
                for other in ((place + distance) % count, (place - distance) % count)
                if other != place
            )
        )
        for place in range(count)
    )


def judge_links(
    gang: Sequence[str],
    calls: Iterable[LinkCall],
    unusable: Mapping[str, str],
    earlier: Iterable[tuple[str, str]] = (),
) -> LinkFindings:
    """Return which links are broken, and the nodes at fault.

    Args:
        gang: The nodes of the generation, by group rank.
        calls: What was tried. A pair that was not tried, or whose caller did not report, says
            nothing. Nodes that are not of the gang are witnesses.
        unusable: Nodes of the gang that cannot listen at their own address, with the reason.
        earlier: Links that were found broken since training last advanced. A node that failed with
            another peer then fails with one more now.
    """
    rank = {node: place for place, node in enumerate(gang)}
    tried = {(call.caller, call.target): call.problem for call in calls}
    good = _find_good(tried)
    # A witness that reaches no node of the gang shows only that its own network is down.
    witnesses = [node for node in good if node not in rank and good[node] & rank.keys()]
    known = {*rank, *witnesses}
    found = [one for one in _find_broken(tried, rank) if known.issuperset(one.nodes)]
    bad: dict[str, set[str]] = {node: set() for node in known}
    for one, other in (*(link.nodes for link in found), *earlier):
        bad.setdefault(one, set()).add(other)
        bad.setdefault(other, set()).add(one)
    links = [link for link in found if rank.keys() >= set(link.nodes)]
    down = tuple(node for node in gang if node in unusable)
    suspects = (*down, *_find_cover(links, bad, good, rank, down))
    if not suspects:
        return LinkFindings(_describe_good(gang, tried, rank))
    kept, dropped = tuple(links[:MAX_LINKS]), max(0, len(links) - MAX_LINKS)
    first = f"{down[0]}: {unusable[down[0]]}" if down else _describe_link(links[0])
    if 2 * len(suspects) > len(known):
        most = f"{first}; most of the {len(gang)} nodes fail alike, so it is none of them alone"
        return LinkFindings(most, broken=kept, dropped=dropped)
    proven = 2 * len(suspects) < len(known) and all(
        node in unusable or len(bad[node]) >= MIN_PEERS for node in suspects
    )
    reason = first if down else _describe_broken(links, suspects[0], bad, good)
    return LinkFindings(reason, suspects, proven, kept, dropped)


def _find_broken(tried: Mapping[tuple[str, str], str], rank: Mapping[str, int]) -> list[BrokenLink]:
    found: dict[frozenset[str], BrokenLink] = {}
    for (caller, target), problem in tried.items():
        if not problem or frozenset((caller, target)) in found:
            continue
        one, other = sorted((caller, target), key=lambda node: (rank.get(node, len(rank)), node))
        one_way = caller if tried.get((target, caller)) == "" else ""
        found[frozenset((caller, target))] = BrokenLink((one, other), problem, one_way)
    return list(found.values())


def _find_good(tried: Mapping[tuple[str, str], str]) -> dict[str, set[str]]:
    """Return, for each node that took part, the nodes with which no tried call failed."""
    good: dict[str, set[str]] = {}
    for caller, target in tried:
        fine = not tried[caller, target] and not tried.get((target, caller), "")
        for one, other in ((caller, target), (target, caller)):
            good.setdefault(one, set()).update((other,) if fine else ())
    return good


def _find_cover(
    links: Sequence[BrokenLink],
    bad: Mapping[str, set[str]],
    good: Mapping[str, set[str]],
    rank: Mapping[str, int],
    down: Sequence[str],
) -> tuple[str, ...]:
    """Return few nodes without which all that are left can speak, the worst first.

    Of two that are alike the later in the gang: the first node holds the rendezvous.
    """
    left = [set(link.nodes) for link in links if not set(link.nodes) & set(down)]
    cover: list[str] = []
    while left:
        worst = max(
            (node for pair in left for node in pair),
            key=lambda node: (len(bad[node] - set(cover)), -len(good[node]), rank[node]),
        )
        cover.append(worst)
        left = [pair for pair in left if worst not in pair]
    return tuple(cover)


def _describe_good(
    gang: Sequence[str], tried: Mapping[tuple[str, str], str], rank: Mapping[str, int]
) -> str:
    asked = len({frozenset(pair) for pair in tried if rank.keys() >= set(pair)})
    names = join_names(gang, NAMED)
    if not asked:
        return f"whether {names} reach each other is not known"
    return f"{names} reach each other over the job's network ({count_noun(asked, 'pair')} tried)"


def _describe_link(link: BrokenLink) -> str:
    one, other = link.nodes
    over = f"over the job's network ({link.problem})"
    if not link.one_way:
        return f"{one} and {other} cannot reach each other {over}"
    target = other if link.one_way == one else one
    return f"{link.one_way} cannot reach {target} {over}, while {target} reaches {link.one_way}"


def _describe_broken(
    links: Sequence[BrokenLink],
    worst: str,
    bad: Mapping[str, set[str]],
    good: Mapping[str, set[str]],
) -> str:
    """Return a link of the worst node, and what the nodes of that link do with others."""
    link = next(one for one in links if worst in one.nodes)
    peer = next(node for node in link.nodes if node != worst)
    parts = [_describe_link(link)]
    if more := sorted(bad[worst] - {peer}):
        parts.append(f"nor can {worst} and {join_names(more, NAMED)}")
    for node in (peer, worst):
        if others := sorted(good[node]):
            parts.append(f"{node} and {join_names(others, NAMED)} reach each other")
    return "; ".join(parts)
