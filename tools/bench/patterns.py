"""Access patterns of programs that read model files, as plain data: which ranges, in which order, in which pass.

`tools/bench zoo` replays them on real mounts, and property tests replay them on an engine in memory. Every generator is
pure: the same arguments give the same pattern. Offsets and sizes are multiples of `PAGE`.

    Pattern   the files that it uses and its stages, which run one after another
    Stage     the readers that run at the same time; all of them finish a pass before any of them starts the next
    Reader    a process and its passes; a pass is the list of the ranges that the process touches, in order

Every page of a range is touched once, in ascending order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

from llmcache.model.tensors import Experts, ModelLayout

from . import routing

PAGE = 4096
MB = 1_000_000
WARMUP = 5
"""The number of first passes, which are not judged."""
PASSES = 11


class Touch(NamedTuple):
    """A range that is touched: the number of the file in `Pattern.files`, and bytes of that file."""

    file: int
    first_byte: int
    size_bytes: int


Pass = tuple[Touch, ...]
How = Literal["mmap", "read", "direct"]
HOW: tuple[How, ...] = ("mmap", "read", "direct")


@dataclass(frozen=True)
class Space:
    """The range of a file that a model loops over (all tensors except the embedding), or the whole of another file."""

    name: str
    first_byte: int
    size_bytes: int

    def part(self, begin: float, end: float) -> tuple[int, int]:
        """Return first byte and size of the pages from the share `begin` to the share `end` of the space."""
        first = -(-(self.first_byte + int(begin * self.size_bytes)) // PAGE) * PAGE
        last = (self.first_byte + int(end * self.size_bytes)) // PAGE * PAGE
        return first, max(0, last - first)


@dataclass(frozen=True)
class Reader:
    """A process.

    `how`: it maps the files, preads 1 MiB at a time, or does the latter with O_DIRECT. `copies`: it keeps a private copy of
    all data that it reads. `idle_s`: the duration of a pass that touches nothing. `advised`: numbers of the files whose
    mappings it advises MADV_RANDOM.
    """

    passes: tuple[Pass, ...]
    how: How = "mmap"
    copies: bool = False
    idle_s: float = 0.0
    advised: tuple[int, ...] = ()

    def copied_bytes(self) -> int:
        return sum(touch.size_bytes for one in self.passes for touch in one) if self.copies else 0


@dataclass(frozen=True)
class Stage:
    """Readers that run at the same time; `shared`: forks of one process, all of which use its file descriptors."""

    readers: tuple[Reader, ...]
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the plan that `clients/zoo_reader.py` reads, in which the numbers of a pass are one list."""
        readers = [
            {**vars(reader), "passes": [[*chain.from_iterable(one)] for one in reader.passes]} for reader in self.readers
        ]
        return {"readers": readers, "shared": self.shared}


@dataclass(frozen=True)
class Rows:
    """Random rows next to a loop: `count` in each pass from pass `first` on, none in the passes from WARMUP to `first`."""

    first: int
    count: int


@dataclass(frozen=True)
class Pattern:
    """Files by name, and the stages that read them.

    `used_bytes`: the distinct bytes that the loop uses in a cycle, of which memory sizes are shares. `loop_bytes`: the mean
    size of a pass, of which a mount may read 1 % a pass more than the page cache.
    """

    files: tuple[str, ...]
    stages: tuple[Stage, ...]
    used_bytes: int
    loop_bytes: int
    rows: Rows | None = None

    def passes(self) -> int:
        return sum(len(stage.readers[0].passes) for stage in self.stages)


def whole(space: Space, file: int = 0, begin: float = 0.0, end: float = 1.0) -> Pass:
    """Return a pass over one range of a space, given as shares."""
    return (Touch(file, *space.part(begin, end)),)


def touched_bytes(one: Iterable[Touch]) -> int:
    return sum(touch.size_bytes for touch in one)


def _looping(spaces: Sequence[Space], passes: Sequence[Pass], used: Iterable[Touch] | None = None) -> Pattern:
    """Return a pattern of one mapping process; `used`: the distinct ranges of a cycle, by default those of the last pass."""
    judged = passes[WARMUP:] or passes
    mean = sum(map(touched_bytes, judged)) // len(judged)
    stages = (Stage((Reader(tuple(passes)),)),)
    cycle = touched_bytes(passes[-1] if used is None else used)
    return Pattern(tuple(space.name for space in spaces), stages, cycle, mean)


def full_loop(space: Space, passes: int = PASSES) -> Pattern:
    return _looping([space], [whole(space)] * passes)


def tail_loop(space: Space, share: float = 0.4, passes: int = PASSES) -> Pattern:
    """Return one pass over the whole space, then a loop over its last `share`: repacked models, offloaded layers."""
    return _looping([space], [whole(space), *[whole(space, 0, 1 - share)] * (passes - 1)])


def strided_loop(space: Space, used_bytes: int = 8 * MB, period_bytes: int = 20 * MB, passes: int = PASSES) -> Pattern:
    """Return one pass over the whole space, then a loop over `used_bytes` of every `period_bytes`."""
    used, period = used_bytes // PAGE * PAGE, period_bytes // PAGE * PAGE
    first, size = space.part(0, 1)
    pieces = tuple(Touch(0, first + at, min(used, size - at)) for at in range(0, size, period))
    return _looping([space], [whole(space), *[pieces] * (passes - 1)])


def moving_loop(space: Space, share: float = 0.4, passes: int = 28, move: int = 20) -> Pattern:
    """Return a loop over the first `share` of the space, over the last `share` from pass `move` on."""
    before, after = whole(space, 0, 0, share), whole(space, 0, 1 - share)
    return _looping([space], [*[before] * move, *[after] * (passes - move)])


def alternating_loops(spaces: Sequence[Space], turn: int = 4, passes: int = 5 * 4) -> Pattern:
    """Return loops over several models, `turn` passes over each before the next model."""
    each = [whole(space, number) for number, space in enumerate(spaces)]
    order = [each[number // turn % len(each)] for number in range(passes)]
    return _looping(spaces, order, [touch for one in each for touch in one])


def load_once(space: Space, how: How = "mmap", idle: int = 8, idle_s: float = 0.5) -> Pattern:
    """Return a program that copies the space into private memory during the first `WARMUP` passes, then never reads it."""
    cuts = [number / WARMUP for number in range(WARMUP + 1)]
    load = [whole(space, 0, begin, end) for begin, end in pairwise(cuts)]
    reader = Reader((*load, *[()] * idle), how, copies=True, idle_s=idle_s)
    size = touched_bytes(touch for one in load for touch in one)
    return Pattern((space.name,), (Stage((reader,)),), size, size)


def divided_loop(space: Space, share: float = 0.3, passes: int = PASSES) -> Pattern:
    """Return a pass over the whole space, then a loop over its first `share` while another process loops over the rest."""
    loader = Reader((whole(space), *[whole(space, 0, 0, share)] * (passes - 1)))
    other = Reader((whole(space, 0, share),) * passes)
    size = touched_bytes(whole(space))
    return Pattern((space.name,), (Stage((loader, other)),), size, size)


def rows_beside_loop(
    space: Space, table: Space, rows: int = 512, advised: bool = False, passes: int = 5, seed: int = 0
) -> Pattern:
    """Return a loop with `rows` rows of a table before each pass, except for the `passes` passes in the middle.

    A row is a page of the table. No row occurs twice, so exact reads cost one page a row. The cost of rows is the difference
    between the last `passes` passes, which read rows, and the passes in the middle.
    """
    first, size = table.part(0, 1)
    chosen = random.Random(seed).sample(range(size // PAGE), rows * (passes + WARMUP))
    gathers = [
        tuple(Touch(1, first + PAGE * row, PAGE) for row in chosen[at : at + rows]) for at in range(0, len(chosen), rows)
    ]
    loop = whole(space)
    with_rows = [(*gather, *loop) for gather in gathers]
    order = (*with_rows[:WARMUP], *[loop] * passes, *with_rows[WARMUP:])
    reader = Reader(order, advised=(1,) if advised else ())
    size = touched_bytes(loop)
    return Pattern((space.name, table.name), (Stage((reader,)),), size, size, Rows(WARMUP + passes, rows))


def draft_and_target(draft: Space, target: Space, drafts: int = 4, passes: int = PASSES) -> Pattern:
    """Return speculative decoding: `drafts` passes over the draft model before each pass over the target."""
    one = (*whole(draft, 0) * drafts, *whole(target, 1))
    return _looping([draft, target], [one] * passes, (*whole(draft, 0), *whole(target, 1)))


def forked_readers(space: Space, processes: int = 4, passes: int = PASSES) -> Pattern:
    """Return forks of one process that share its file descriptor, each of which preads its part of the space."""
    cuts = [number / processes for number in range(processes + 1)]
    parts = [whole(space, 0, begin, end) for begin, end in pairwise(cuts)]
    stage = Stage(tuple(Reader((part,) * passes, "read") for part in parts), shared=True)
    size = touched_bytes(touch for part in parts for touch in part)
    return Pattern((space.name,), (stage,), size, size)


def restarted_loop(space: Space, share: float = 1.0, passes: int = PASSES, restart: int = 7) -> Pattern:
    """Return a loop over the last `share` of the space whose process ends before pass `restart`; a new one continues."""
    loop = whole(space, 0, 1 - share)
    stages = tuple(Stage((Reader((loop,) * count),)) for count in (restart, passes - restart))
    return Pattern((space.name,), stages, touched_bytes(loop), touched_bytes(loop))


def prefill_and_decode(
    file: str, layout: ModelLayout, tokens: int = 120, prompts: Sequence[int] = (0, 60), share: float = 0.95, seed: int = 0
) -> Pattern:
    """Return prompts and answers of an MoE model: a pass is a prompt at the numbers in `prompts`, else a token.

    A prompt reads the model once, layer by layer, with `share` of the experts of each layer. Tokens are routed as in
    `routing.ranked`.
    """
    layers = Experts(layout).layers
    count, used = layers[0][2], layout.experts_used or 1
    routed, _ = routing.ranked(tokens, len(layers), count, used, seed=seed)
    rng = random.Random(seed)
    chosen: list[Sequence[Sequence[int]]] = routed.tolist()
    for prompt in prompts:
        chosen[prompt] = [sorted(rng.sample(range(count), round(share * count))) for _ in layers]
    passes = routed_passes(layout, chosen)
    decoded = [touched_bytes(one) for number, one in enumerate(passes) if number not in prompts]
    used_bytes = sum(region.size_bytes for region in layout.regions() if region.role == "loop")
    return Pattern((file,), (Stage((Reader(passes),)),), used_bytes, sum(decoded) // len(decoded))


def routed_passes(layout: ModelLayout, tokens: Iterable[Sequence[Iterable[int]]]) -> tuple[Pass, ...]:
    """Return a pass for each token: the pages that hold the ranges of `routing.ranges`."""
    return tuple(tuple(Touch(0, *_pages(*one)) for one in ranges) for ranges in routing.ranges(layout, tokens))


def _pages(first_byte: int, size_bytes: int) -> tuple[int, int]:
    first = first_byte // PAGE * PAGE
    return first, -(-(first_byte + size_bytes) // PAGE) * PAGE - first


def generate(seed: int, size_bytes: int) -> Pattern:
    """Return a random pattern of at most `size_bytes` in all files, for property tests; no MoE models."""
    rng = random.Random(seed)
    share = rng.uniform(0.1, 0.9)
    space, half = Space("a", 0, size_bytes), Space("a", 0, size_bytes // 2)
    second = Space("b", 0, size_bytes // 2)
    period = max(2 * PAGE, int(size_bytes * rng.uniform(0.01, 0.2)))
    made: tuple[Callable[[], Pattern], ...] = (
        lambda: full_loop(space),
        lambda: tail_loop(space, share),
        lambda: strided_loop(space, max(PAGE, int(share * period)), period),
        lambda: moving_loop(space, share, move=rng.randrange(6, 26)),
        lambda: alternating_loops((half, second), rng.randrange(1, 8)),
        lambda: load_once(space, rng.choice(HOW)),
        lambda: divided_loop(space, share),
        lambda: rows_beside_loop(half, second, rng.randrange(1, size_bytes // PAGE // 50), rng.random() < 0.5, seed=seed),
        lambda: draft_and_target(replace(half, size_bytes=int(share * size_bytes / 2)), second, rng.randrange(1, 8)),
        lambda: forked_readers(space, rng.randrange(2, 8)),
        lambda: restarted_loop(space, share, restart=rng.randrange(1, PASSES)),
    )
    return rng.choice(made)()
