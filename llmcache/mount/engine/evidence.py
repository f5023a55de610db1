"""Checks, at the end of each pass over a loop space, whether steering matches what clients use.

- Extents that are no longer in use (`llmcache.cache.loops.RecentUse`) are not pinned or fetched ahead. Touches of resident
  extents cannot always be observed, so these are sometimes *exposed*: the back end clears the accessed bits of their pages
  (in place) or drops one page of each extent (FUSE). This costs clients time, so it is rare unless the use has changed.
- If steering reads more than a shadow LRU cache (`llmcache.cache.shadow`), the space is left to the kernel, until the kernel
  reads more than steering is expected to read.

Every method expects the engine's lock, except the jobs, which take it.
"""

from __future__ import annotations

import functools
import logging
import time
from array import array
from collections.abc import Callable, Sequence

from llmcache.cache.arbitration import MIN_WINDOW_BYTES
from llmcache.cache.loops import UNUSED_PASSES
from llmcache.cache.shadow import Guard
from llmcache.cache.space import SpacePlan
from llmcache.mount.state.interfaces import Backend, PinStore
from llmcache.mount.state.space import ABSENT, LOADING, PINNED, READY, SINGLE, SPARSE, TOUCHED, LoopSpace, SpaceFile
from llmcache.mount.state.state import CacheState, ranges
from llmcache.units import format_size

log = logging.getLogger(__name__)

# A constant marked "inverted" is the denominator of a share: 4 stands for 1/4.
SHADOW_EXTENTS = 2048  # extents of one space in the shadow: of a larger space, every n-th extent counts n times
BOUND_SHARE = 2  # inverted: share of the memory that may be read in excess before the decision changes
WINDOW_PASSES, EXPERT_PASSES = 3, 16  # passes in one comparison; more for MoE models, because their tokens vary
MOVED_SHARE = 4  # inverted: if clients begin to use more than this share of the pinned bytes elsewhere, the set has moved
LOOK_NS, LOOK_SHARE = 1_000_000_000, 16  # least time, and share of the loop read (inverted), to judge without a pass
NOISE_SHARE = 100  # inverted: share of the loop below which an excess in a pass is noise
THIN_SHARE = 4  # inverted: share of an extent in use, below which it is read by pages
TINY_BYTES = 64 << 10  # norms and biases
TRIAL_PASSES = 8  # passes from the first trial to the next; doubled after each trial
TRIAL_FIT = 0.85  # share of the bytes in use (an estimate) that must fit in memory for a trial
SUSPICIOUS_SHARE = 50  # inverted: share of the extents in use that are untouched, above which they are exposed
EXPOSURE_PASSES, EXPOSURE_MAX_PASSES = 2, 64  # passes between exposures; doubled after each that found nothing
PINS_NS, PINS_PERIODS, PINS_MAX_NS = 10_000_000_000, 3, 300_000_000_000  # between exposures of a loop that is pinned whole
EXPOSURE_REST = 25  # pause between exposures, as a multiple of the time that the last one took
_VISIBLE = frozenset((ABSENT, SPARSE, LOADING, READY))  # their next touch is observed


class Judge:
    """Judges the loop spaces of one mount."""

    def __init__(self, state: CacheState, backend: Backend, pin_store: PinStore, replan: Callable[[], None]) -> None:
        self.state, self.backend, self.pin_store, self._replan = state, backend, pin_store, replan
        self._rest_until = 0.0

    @property
    def is_exposing(self) -> bool:
        return any(space.evidence.exposed for space in list(self.state.index.looping))

    def touched(self, space: LoopSpace, extent: int) -> None:
        step = -(-space.count // SHADOW_EXTENTS)
        if extent % step:
            return
        self._shadow(space, extent, step * self.used_bytes(space, extent))
        if space.use.returned and not space.left and self._has_moved(space):
            self._set_moved(space)

    def _has_moved(self, space: LoopSpace) -> bool:
        """Return True if clients use other extents now, except by loading the model, which touches everything once."""
        pinned_bytes = space.pinned_bytes
        is_full = self.state.memory.used_bytes > self.state.memory.limit_bytes * 7 // 8
        is_loading = space.opened_ns >= space.evidence.ended_ns
        return is_full and not is_loading and space.use.returned * space.extent_bytes * MOVED_SHARE > pinned_bytes > 0

    def _set_moved(self, space: LoopSpace) -> None:
        if space.user_pinned or space.has_experts:
            return
        self._guard_of(space).leave()
        log.info("inode %d is left to the kernel: clients have begun to use other parts of it", space.inode)
        pinned = self.pin_store.pinned(space)
        self.turn(space, True)
        if self.backend.in_place:
            self._queue(self._drop, space, pinned)

    def _drop(self, space: LoopSpace, extents: list[int]) -> None:
        """Drop unpinned extents, because the kernel takes them for recently used."""
        self.pin_store.settle()
        with self.state.lock:
            parts = space.ranges(extents) if space.alive and space.left else []
        for member, offset, length in parts:
            if member.node is not None:
                self.backend.drop(member.node, [(offset, length)])

    def touched_pages(self, space: LoopSpace, extent: int, resident_bytes: int) -> None:
        step = -(-space.count // SHADOW_EXTENTS)
        if not extent % step:
            self._shadow(space, extent, step * resident_bytes)

    def _shadow(self, space: LoopSpace, extent: int, size_bytes: int) -> None:
        before = self.state.shadow.read_bytes
        self.state.shadow.touch((space.key, extent), size_bytes)
        space.evidence.lru_bytes += self.state.shadow.read_bytes - before

    def used_bytes(self, space: LoopSpace, extent: int) -> int:
        """Estimate the bytes of an extent in use: half of one next to an unused extent, or less by the tensors in use."""
        member, unused = space.member_of(extent), space.use.unused
        size = space.length_of(member, extent)
        for neighbour in (extent - 1, extent + 1):
            if member.base <= neighbour < member.base + member.count and unused[neighbour]:
                size //= 2
        used_bytes = space.evidence.used_bytes
        return min(size, used_bytes[extent]) if used_bytes is not None and member.tensors else size

    def _weigh(self, space: LoopSpace) -> None:
        """Estimate the bytes of each extent in use, and mark extents as thin that are hardly used.

        A tensor is used if an extent that lies wholly in it is used. A smaller tensor is used if all its extents are, and no
        other tensor explains why. Tiny tensors (norms, biases) are used whenever their extent is.
        """
        if 1 not in space.use.unused:
            space.evidence.used_bytes = None
            return
        used_bytes = array("L", bytes(array("L").itemsize * space.count))
        for member in space.members:
            if member.tensors:
                _weigh_member(space, member, used_bytes)
        space.evidence.used_bytes = used_bytes
        thin = [
            extent
            for extent in range(space.count)
            if 0 < used_bytes[extent] * THIN_SHARE < space.extent_bytes
            and not (space.use.unused[extent] or space.single[extent])
        ]
        if thin:  # as if a header had said so
            self.state.steering.guess(space.key, ranges(thin), ranges(thin), [])
            self.state.memory.count_hot(space)
            space.use.changed = True

    def _make_single(self, space: LoopSpace) -> None:
        thin = sorted(space.thin)
        self.pin_store.release(space, [extent for extent in thin if space.state(extent) == PINNED])
        if self.backend.in_place:
            self.state.memory.forget(space, [each for each in thin if space.state(each) in (TOUCHED, READY)])
        space.make_single([extent for extent in thin if space.state(extent) in (ABSENT, SPARSE)])

    def pass_ended(self, space: LoopSpace) -> None:
        """A space that is not known to loop is not steered."""
        if not space.looping:
            return
        use = space.use
        by_rank = list(zip(space.order.extent_at, space.status, strict=True))
        visible = [extent for extent, state in by_rank if state in _VISIBLE]
        returned = use.changed
        if not space.left:
            self._drop_out(space, use.judge(self._silent(space, visible)))
            if use.changed:
                self._weigh(space)
            self._make_single(space)
            hidden = [extent for extent, state in by_rank if state in (PINNED, TOUCHED)]
            self._assume_touched(space, hidden)
            late = sum(map(use.is_late, visible))
            in_use = len(by_rank) - space.status.count(SINGLE) - use.unused.count(1)
            self._expose(space, hidden, is_suspicious=returned or late * SUSPICIOUS_SHARE > in_use)
        else:  # a touch of a resident extent may cause no event
            use.judge(self._silent(space, visible))
        self._guard(space)
        self._replan_if_changed(space)

    def _silent(self, space: LoopSpace, visible: Sequence[int]) -> list[int]:
        """Return the extents untouched for some passes whose touches would be observed."""
        use = space.use
        silent = [extent for extent in visible if use.untouched(extent) >= UNUSED_PASSES and not use.unused[extent]]
        absent = [extent for extent in silent if space.state(extent) in (ABSENT, SPARSE)]
        return [extent for extent in silent if space.state(extent) in (LOADING, READY)] + list(
            self.backend.absent(space, absent)
        )

    def look(self, space: LoopSpace, now_ns: int) -> None:
        """Judge a space whose passes do not end, because most of it is pinned."""
        evidence = space.evidence
        if self.backend.in_place and space.looping and not (space.left or space.user_pinned):
            self._look_at_pins(space, now_ns)
        if space.left or not evidence.ended_ns or space.last_ns < evidence.ended_ns or space.touches.period is None:
            return
        read_bytes = self.backend.read_bytes(space) - evidence.seen_read_bytes
        if (
            now_ns - evidence.ended_ns < max(LOOK_NS, space.touches.period)
            or read_bytes * LOOK_SHARE < space.used_loop_bytes
        ):
            return
        by_rank = zip(space.order.extent_at, space.status, strict=True)
        self._assume_touched(space, [extent for extent, state in by_rank if state in (PINNED, TOUCHED)])
        self._guard(space)

    def _assume_touched(self, space: LoopSpace, hidden: Sequence[int]) -> None:
        for extent in hidden:
            if not space.use.unused[extent] and space.use.untouched(extent):
                self.touched(space, extent)
                self.state.consumed(self.used_bytes(space, extent), True)

    def _drop_out(self, space: LoopSpace, extents: Sequence[int]) -> None:
        for extent in extents:
            if space.state(extent) == ABSENT:
                space.set_state(extent, SPARSE)

    # Exposures

    def _expose(self, space: LoopSpace, hidden: Sequence[int], *, is_suspicious: bool) -> None:
        use, evidence = space.use, space.evidence
        if evidence.exposed:
            if use.passes - evidence.exposed_pass >= UNUSED_PASSES:
                self._queue(self._examine, space)
            return
        gap = evidence.exposure_gap if is_suspicious else EXPOSURE_MAX_PASSES
        if use.passes < evidence.exposed_pass + gap or time.monotonic() < self._rest_until or not hidden:
            return
        evidence.exposure_gap = min(EXPOSURE_MAX_PASSES, 2 * evidence.exposure_gap)
        use.excuse(hidden)
        self._start(space, hidden)

    def _start(self, space: LoopSpace, extents: Sequence[int]) -> None:
        evidence = space.evidence
        evidence.exposed, evidence.exposed_pass = set(extents), space.use.passes
        self._queue(self._begin, space, list(extents))

    def _queue(self, job: Callable[..., None], *arguments: object) -> None:
        self.state.queue(functools.partial(job, *arguments))

    def _begin(self, space: LoopSpace, hidden: list[int]) -> None:
        began = time.monotonic()
        exposed = self.backend.expose(space, hidden) if space.alive else ()
        self._rest_until = time.monotonic() + EXPOSURE_REST * (time.monotonic() - began)
        with self.state.lock:
            space.evidence.exposed.intersection_update(exposed)

    def _examine(self, space: LoopSpace) -> None:
        with self.state.lock:
            exposed = [extent for extent in space.evidence.exposed if space.state(extent) in (PINNED, TOUCHED)]
        touched = self.backend.conclude(space, exposed)
        with self.state.lock:
            space.use.excuse(touched)  # the time of these touches is unknown
            for extent in touched:
                space.use.touch(extent)
            dropped_out = space.use.judge(exposed) if space.alive else []
            if dropped_out:
                space.evidence.exposure_gap = EXPOSURE_PASSES
            self._end_exposure(space, dropped_out)

    def _end_exposure(self, space: LoopSpace, dropped_out: Sequence[int]) -> None:
        space.evidence.exposed.clear()
        if dropped_out:
            self._drop_out(space, dropped_out)
            self._weigh(space)
            self._make_single(space)
        self._replan_if_changed(space)

    def _replan_if_changed(self, space: LoopSpace) -> None:
        if space.use.changed:
            space.use.changed = False
            self._replan()

    def _look_at_pins(self, space: LoopSpace, now_ns: int) -> None:
        """Now and then, expose a loop that is pinned whole, because its touches cause no event.

        Otherwise a model whose weights the engine has copied would stay pinned forever.
        """
        evidence = space.evidence
        if now_ns < evidence.pins_due_ns or space.status.count(PINNED) * space.extent_bytes < space.used_loop_bytes:
            return
        period_ns = PINS_PERIODS * (space.touches.period or 0)
        evidence.pins_due_ns = now_ns + max(PINS_NS, period_ns)
        if evidence.exposed:
            self._queue(self._examine_pins, space)
        else:
            pinned = self.pin_store.pinned(space)
            if not evidence.pins_doubted:
                space.use.excuse(pinned)
            self._start(space, pinned)

    def _examine_pins(self, space: LoopSpace) -> None:
        """Count the time since an exposure as a pass, unless no client has touched anything."""
        with self.state.lock:
            exposed = [extent for extent in space.evidence.exposed if space.state(extent) == PINNED]
        touched = set(self.backend.conclude(space, exposed))
        with self.state.lock:
            evidence, use = space.evidence, space.use
            if not touched or not space.alive or space.left:
                return
            for extent in touched:
                use.touch(extent)
            use.end_pass()
            untouched = [extent for extent in exposed if extent not in touched]
            evidence.pins_doubted = bool(untouched)
            if untouched:  # exposed again at once, until it is known whether they are in use
                evidence.pins_due_ns = 0
            else:
                evidence.pins_gap_ns = min(PINS_MAX_NS, max(PINS_NS, 2 * evidence.pins_gap_ns))
                evidence.pins_due_ns = time.monotonic_ns() + evidence.pins_gap_ns
            self._end_exposure(space, use.judge(untouched))

    # The guard

    def _guard(self, space: LoopSpace) -> None:
        evidence = space.evidence
        has_experts = space.has_experts
        evidence.passes += 1
        evidence.ended_ns = time.monotonic_ns()
        evidence.seen_read_bytes = self.backend.read_bytes(space)
        passes = evidence.passes
        if passes < (EXPERT_PASSES if has_experts else WINDOW_PASSES) and space.use.passes > 1:
            return
        evidence.passes, evidence.window_passes = 0, passes
        guard = self._guard_of(space)
        now_read_bytes = evidence.seen_read_bytes
        read_bytes, lru_bytes = now_read_bytes - evidence.judged_read_bytes, evidence.lru_bytes - evidence.judged_lru_bytes
        evidence.judged_read_bytes, evidence.judged_lru_bytes = now_read_bytes, evidence.lru_bytes
        if not self.state.is_calm:  # reads under growing pressure are no evidence, and pins would return too early
            return
        if space.use.passes < 2:  # the first pass loads the model, and began before its touches were observed
            return
        if space.left:
            missing_bytes = 0 if has_experts else max(0, read_bytes - lru_bytes)  # no touches of experts while left
            evidence.missing_bytes += (missing_bytes - evidence.missing_bytes) / 2
            expected_bytes = evidence.tried_bytes if evidence.tried_bytes is not None else self._expected_bytes(space)
            steered_bytes, lru_bytes = passes * expected_bytes, read_bytes
        else:
            steered_bytes, lru_bytes = read_bytes, lru_bytes + int(evidence.missing_bytes)
        if space.user_pinned or (has_experts and not self.backend.in_place):
            return  # the user pins it; over FUSE, experts cannot be left to the kernel
        is_left = not guard.judge(steered_bytes, lru_bytes)
        if is_left is space.left:
            if not has_experts and self._is_trial_due(space, read_bytes, passes):
                self._try(space, read_bytes // passes)
            return
        evidence.tried_bytes = None
        steered, lru = (format_size(size // passes) for size in (steered_bytes, lru_bytes))
        decision = "left to the kernel" if is_left else "steered again"
        log.info("inode %d is %s: steering reads %s a pass, the page cache (LRU) %s", space.inode, decision, steered, lru)
        evidence.steered_bytes = steered_bytes // passes
        self.turn(space, is_left)

    def _is_trial_due(self, space: LoopSpace, read_bytes: int, passes: int) -> bool:
        """Return True if the estimated bytes in use nearly fit: a small error decides whether LRU reads nothing or
        everything.
        """
        evidence, unused = space.evidence, space.use.unused.count(1)
        is_stable, evidence.unused = unused == evidence.unused, unused
        is_estimated = unused > 0 or 1 in space.single
        return (
            self.backend.in_place  # over FUSE, the mount evicts extents beyond its budget in LRU order even during a trial
            and not space.left
            and is_stable
            and is_estimated
            and space.use.passes >= evidence.trial_pass
            and read_bytes > passes * space.used_loop_bytes // NOISE_SHARE
            and self._in_use_bytes(space) * TRIAL_FIT < self.state.shadow.capacity_bytes
        )

    def _in_use_bytes(self, space: LoopSpace) -> int:
        unused = space.use.unused
        return sum(self.used_bytes(space, extent) for extent in range(space.count) if not unused[extent])

    def _try(self, space: LoopSpace, steered_bytes: int) -> None:
        evidence = space.evidence
        evidence.tried_bytes = evidence.steered_bytes = steered_bytes
        evidence.trial_gap = max(TRIAL_PASSES, 2 * evidence.trial_gap)
        evidence.trial_pass = space.use.passes + evidence.trial_gap
        self._guard_of(space).leave()
        log.info(
            "inode %d is left to the kernel as a trial: steering reads %s a pass, and the kernel may read less",
            space.inode,
            format_size(steered_bytes),
        )
        self.turn(space, True)

    def _guard_of(self, space: LoopSpace) -> Guard:
        evidence = space.evidence
        bound_bytes = max(MIN_WINDOW_BYTES, self.state.shadow.capacity_bytes // BOUND_SHARE)
        if evidence.guard is None:
            noise_bytes = WINDOW_PASSES * space.used_loop_bytes // NOISE_SHARE
            evidence.guard = Guard(bound_bytes, noise_bytes)
        evidence.guard.bound_bytes = bound_bytes
        return evidence.guard

    def _expected_bytes(self, space: LoopSpace) -> int:
        """Return the bytes that steering would read in a pass; for an MoE model, those that it read before the space was
        left.
        """
        guard = space.evidence.guard
        if guard is not None and space.has_experts:
            return int(space.evidence.steered_bytes)
        others = self.state.memory.pinned_bytes - space.pinned_bytes
        missing_bytes = space.used_loop_bytes - max(0, self.state.memory.limit_bytes - others)
        return missing_bytes + self.state.least_window_bytes if missing_bytes > 0 else 0

    def turn(self, space: LoopSpace, is_left: bool) -> None:
        if not space.alive:  # a reader that found it before may still end a pass
            return
        if is_left:
            self.state.steering.leave(space.key)
        else:
            self.state.steering.steer(space.key)
        space.evidence.exposed.clear()
        for member in space.members:
            if member.moe is not None:
                self.state.expert_cache.turn(member.moe, is_left)
                if not is_left:
                    self._queue(self.backend.find_experts, member.moe)
        if is_left and self.backend.in_place:
            for extent in list(space.loading):
                space.cancel(extent)
            self.pin_store.release(space, self.pin_store.pinned(space))
            space.adopt(SpacePlan(unpin=range(space.count)))
            accounted = list(space.charged_extents())
            self.state.memory.forget(space, [extent for extent in accounted if space.state(extent) != SINGLE])
        else:
            for extent in range(space.count):
                if space.state(extent) in (ABSENT, SPARSE):
                    space.set_state(extent, SPARSE if space.use.unused[extent] else ABSENT)
        self._replan()


def _weigh_member(space: LoopSpace, member: SpaceFile, used_bytes: array[int]) -> None:
    size, unused = space.extent_bytes, space.use.unused
    unknown: list[tuple[int, int]] = []
    explained = set[int]()

    def add(start: int, end: int) -> None:
        for index in range(start // size, -(-end // size)):
            extent = member.base + index
            if not unused[extent]:
                used_bytes[extent] += min(end, (index + 1) * size) - max(start, index * size)
                explained.add(extent)

    for start, end in zip(member.tensors[::2], member.tensors[1::2], strict=True):
        first, last = start // size, (end - 1) // size
        inner = range(member.base + -(-start // size), member.base + end // size)
        if end - start <= TINY_BYTES:
            add(start, end)
        elif len(inner):
            # The ends of a large tensor are used if the whole extents next to them are.
            low = start if not unused[inner[0]] else -(-start // size) * size
            high = end if not unused[inner[-1]] else end // size * size
            add(low, high)
        elif not any(unused[member.base + index] for index in range(first, last + 1)):
            unknown.append((start, end))
    for start, end in unknown:
        if not all(member.base + index in explained for index in range(start // size, -(-end // size))):
            add(start, end)
