"""From the places of one file to its classes: scraps join what they lie in, pieces of one loop become one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from llmcache.cache.detector import HOT, LOOP, SEQ, Class, Place, Trail
from llmcache.cache.intervals import Period, is_about
from llmcache.cache.spots import PLACES
from llmcache.cache.streams import WINDOW, Moment

SAME_PASSES = 0.25  # pieces of one loop differ less in passes: the first or last pass may be in part
MOST_LOOPS = 8  # of one file that are told apart; beyond that, those without a rhythm become one (experts of a mixture)
REGULAR = 0.75  # of the intervals are about the period


@dataclass(frozen=True)
class Found:
    """One class of one file: places in the order of a pass (LOOP) or of blocks, with what they have together."""

    kind: Class
    places: tuple[Place, ...]
    blocks: int
    accesses: int
    passes: int
    since: Moment
    last: Moment
    period: Period | None = None
    regularity: float | None = None
    active: bool | None = None
    order: str | None = None
    stride: int = 0


def classes_of(trail: Trail, now: Moment) -> list[Found]:
    """Returns the classes of what a file's reads, or writes, have shown until `now`."""
    places = list(trail.places())
    walked = _joined([place for place in places if not place.spot and not place.stride])
    spots: list[Place] = []
    strided: list[Place] = []
    for place in places:
        if place.spot and not _settle(place, walked):
            spots.append(place)
        elif place.stride and not _belongs(place, walked):
            strided.append(place)
    drained = sum(place.accesses for place in walked if place.blocks == 0)  # all of it came again, and is hot
    walked = [place for place in walked if place.blocks > 0]
    rest = [*walked, *strided, *spots]
    found = [_loop_of(group, now) for group in _loops(place for place in rest if place.kind == LOOP)]
    hot = [place for place in rest if place.kind == HOT]
    once = [place for place in rest if place.kind == SEQ]
    if hot:
        plain = _plain(HOT, _merged(hot, PLACES))
        found.append(replace(plain, accesses=plain.accesses + drained))
    blocks, accesses = trail.forgotten
    if once or blocks:
        found.append(_once(_merged(once, WINDOW), blocks, accesses, now))
    return found


def _joined(regions: list[Place]) -> list[Place]:
    """Returns regions in which none shorter than a window touches a longer one: that is a ragged edge of it."""
    result: list[Place] = []
    for place in regions:
        before = result[-1] if result else None
        if before is not None and before.end == place.first and min(_length(before), _length(place)) < WINDOW:
            main = max(before, place, key=_length)
            result[-1] = replace(
                main,
                first=before.first,
                end=place.end,
                blocks=before.blocks + place.blocks,
                accesses=before.accesses + place.accesses,
                since=min(before.since, place.since),
                last=max(before.last, place.last),
            )
        else:
            result.append(place)
    return result


def _length(place: Place) -> int:
    return place.end - place.first


def _settle(spot: Place, regions: list[Place]) -> bool:
    """Takes a spot into account in the regions that it lies in; returns whether it is part of one of them.

    Blocks that come no more often than the loop around them are part of it, read out of turn. Blocks that come more
    often are hot, and no part of what lies around them.
    """
    for index, region in enumerate(regions):
        common = min(spot.end, region.end) - max(spot.first, region.first)
        edge = _is_edge(spot, region)
        if common <= 0 and not edge:
            continue
        inside = 2 * common >= _length(spot) or edge
        often = spot.passes if edge else spot.accesses
        if inside and (spot.kind == SEQ or (region.kind == LOOP and often <= region.passes * spot.blocks)):
            regions[index] = replace(region, accesses=region.accesses + spot.accesses)
            return True
        if spot.kind == HOT and common > 0:
            hot = spot.blocks * common // _length(spot)
            regions[index] = replace(region, blocks=max(0, region.blocks - hot))
    return False


def _belongs(strided: Place, regions: list[Place]) -> bool:
    """Takes runs in one distance, walked over once, into account where they were met in a walk without holes."""
    if strided.kind != SEQ or not regions:
        return False
    ends = [region.end for region in regions]
    met = [bisect_right(ends, block) for block in range(strided.first, strided.end, strided.stride)]
    inside = [
        index
        for index, block in zip(met, range(strided.first, strided.end, strided.stride), strict=True)
        if index < len(regions) and regions[index].first <= block
    ]
    if 2 * len(inside) < len(met):
        return False
    index = inside[0]
    regions[index] = replace(regions[index], accesses=regions[index].accesses + strided.accesses)
    return True


def _is_edge(spot: Place, region: Place) -> bool:
    """Whether a spot is a few blocks beside a region, which threads have read out of turn."""
    return _length(spot) < WINDOW and region.first - WINDOW <= spot.first and spot.end <= region.end + WINDOW


def _loops(places: Iterable[Place]) -> list[list[Place]]:
    """Returns the places of each loop together: those that come round with one period, equally often."""
    groups: list[list[Place]] = []
    for place in sorted(places, key=lambda place: -place.blocks):
        group = next((group for group in groups if _is_one(group[0], place)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    if len(groups) <= MOST_LOOPS:
        return groups
    chance = [place for group in groups if group[0].regularity < REGULAR for place in group]
    return [group for group in groups if group[0].regularity >= REGULAR] + ([chance] if chance else [])


def _is_one(main: Place, place: Place) -> bool:
    if main.stride != place.stride or main.period is None or place.period is None:
        return False
    if not is_about(main.period.blocks, place.period.blocks):
        return False
    return abs(main.passes - place.passes) <= max(1, SAME_PASSES * main.passes)


def _loop_of(group: list[Place], now: Moment) -> Found:
    blocks = sum(place.blocks for place in group)
    main = group[0]
    in_turn = sorted(group, key=lambda place: place.start.blocks)
    order = _order(in_turn)
    return replace(
        _plain(LOOP, sorted(group, key=lambda place: place.first) if order == "ascending" else in_turn),
        passes=round(sum(place.passes * place.blocks for place in group) / max(1, blocks)),
        period=_period(main, blocks),
        regularity=main.regularity,
        active=any(not place.expired(now) for place in group),
        order=order,
        stride=main.stride,
    )


def _period(main: Place, blocks: int) -> Period | None:
    """The period of a loop of `blocks`: no shorter than they take, as layers are that are read twice in a row."""
    fitting = [rhythm for rhythm in main.rhythms if rhythm.blocks >= blocks or is_about(rhythm.blocks, blocks)]
    if main.period is None or not fitting or main.period.blocks >= fitting[0].blocks:
        return main.period
    return fitting[0]


def _order(in_turn: Sequence[Place]) -> str:
    """Which way the last passes went; a pass that is under way begins somewhere in the middle."""
    firsts = [place.first for place in in_turn]
    if len(in_turn) == 1:
        return "descending" if in_turn[0].descending else "ascending"
    if _turns(firsts) <= 1 and not any(place.descending for place in in_turn):
        return "ascending"
    return "descending" if _turns(firsts[::-1]) <= 1 else "other"


def _turns(firsts: Sequence[int]) -> int:
    """How often the ring of `firsts` turns back: once, if it goes one way."""
    return sum(later < earlier for earlier, later in pairwise([*firsts, firsts[0]]))


def _merged(places: list[Place], gap: int) -> list[Place]:
    """Returns places in the order of blocks, made one where no more than `gap` blocks lie between them."""
    result: list[Place] = []
    for place in sorted(places, key=lambda place: (place.first, place.end)):
        if result and place.first - result[-1].end <= gap and place.stride == result[-1].stride == 0:
            before = result[-1]
            result[-1] = replace(
                before,
                end=max(before.end, place.end),
                blocks=before.blocks + place.blocks,
                accesses=before.accesses + place.accesses,
                passes=max(before.passes, place.passes),
                since=min(before.since, place.since),
                start=min(before.start, place.start),
                last=max(before.last, place.last),
            )
        else:
            result.append(place)
    return result


def _plain(kind: Class, places: Sequence[Place]) -> Found:
    blocks, accesses = sum(place.blocks for place in places), sum(place.accesses for place in places)
    return Found(
        kind=kind,
        places=tuple(places),
        blocks=blocks,
        accesses=accesses,
        passes=round(accesses / max(1, blocks)),
        since=min(place.since for place in places),
        last=max(place.last for place in places),
        stride=places[0].stride if len({place.stride for place in places}) == 1 else 0,
    )


def _once(places: Sequence[Place], blocks: int, accesses: int, now: Moment) -> Found:
    """What was read once; `blocks` more are not known by place any more."""
    if not places:
        return Found(SEQ, (), blocks, accesses, 1, now, now)
    found = _plain(SEQ, places)
    return replace(found, blocks=found.blocks + blocks, accesses=found.accesses + accesses, passes=_passes(places))


def _passes(places: Sequence[Place]) -> int:
    return max((place.passes for place in places if not place.spot), default=1)
