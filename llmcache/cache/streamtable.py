"""The streams of one file: at most `MAX_CURSORS`, each found in O(1) by where it is expected to go on."""

from __future__ import annotations

from collections import OrderedDict, deque

from llmcache.cache.streams import WINDOW, Moment, Run, Stream, Walk

MAX_CURSORS = 64
MAX_YOUNG = MAX_CURSORS // 2  # streams not yet sequential: random accesses cannot push the sequential ones out
RECENT_STARTS = 4  # new streams that are looked at for a stride longer than a window
_BUCKET = 2 * WINDOW  # blocks: what is within a window lies in one bucket or its neighbour


class StreamTable:
    """Gives every run to a stream; `note` returns what streams have walked meanwhile."""

    def __init__(self) -> None:
        self._young: OrderedDict[int, Stream] = OrderedDict()  # least recent first
        self._proved: OrderedDict[int, Stream] = OrderedDict()
        self._buckets: dict[int, dict[int, Stream]] = {}
        self._places: dict[int, tuple[int, ...]] = {}  # buckets of each stream
        self._starts: deque[Stream] = deque(maxlen=RECENT_STARTS)
        self._strides: OrderedDict[int, tuple[Stream, Stream]] = OrderedDict()  # block that would make a third step
        self._ended: OrderedDict[int, int] = OrderedDict()  # where the clock was when the last few sequential streams ended
        self._accessed = 0  # blocks of this file
        self._latest: Stream | None = None
        self._number = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._proved)

    def streams(self) -> list[Stream]:
        """Returns all streams, sequential ones last."""
        return [*self._young.values(), *self._proved.values()]

    def note(self, run: Run) -> tuple[bool, list[Walk]]:
        """Returns whether `run` repeats the one before it, and the walks that it completes."""
        walks: list[Walk] = []
        stream = self._expected(run) or self._far(run.first, run.end)
        if stream is not None and stream.comes_back(run):
            self._drop(stream, walks)
            stream = None
        if stream is None:
            repeated, stream = False, self._start(run)
        else:
            repeated = stream.repeats(run.first, run.end)
            self._unfile(stream)
            if stream.resumes(self._accessed - stream.left):
                self._note_end(stream)
                walks += filter(None, [stream.resume(self._next_number(), run)])
            stream.take(run, at_once=stream is self._latest)
        if stream.due and (walk := stream.test()) is not None:
            self._overtake(stream, walk, walks)
            walks.append(walk)
        self._file(stream, walks)
        self._latest = stream
        self._accessed += run.end - run.first
        stream.left = self._accessed
        return repeated, walks

    def _overtake(self, stream: Stream, walk: Walk, walks: list[Walk]) -> None:
        """Ends streams of earlier passes that stopped where `walk` has come by: their last steps come before it."""
        for other in list(self._proved.values()):
            here = walk.first - WINDOW <= other.head <= walk.end + WINDOW
            if here and other is not stream and other.stop.blocks <= walk.born.blocks:
                self._drop(other, walks)

    def end(self) -> list[Walk]:
        """Ends all streams; returns what they have walked since the last test."""
        walks: list[Walk] = []
        for stream in self.streams():
            self._drop(stream, walks)
        return walks

    def is_running(self, number: int, since: Moment) -> bool:
        """Whether the stream with this number came on after `since`."""
        stream = self._proved.get(number) or self._young.get(number)
        stop = self._ended.get(number, 0) if stream is None else stream.stop.blocks
        return stop > since.blocks

    def _expected(self, run: Run) -> Stream | None:
        """The stream that goes on within a window of the run."""
        best: Stream | None = None
        best_rank = (True, True, 0)
        first, end = run.first, run.end
        for bucket in {(block + side) // _BUCKET for block in (first, end) for side in (-WINDOW, WINDOW)}:
            for stream in self._buckets.get(bucket, {}).values():
                distance = stream.distance(first, end)
                # The one that goes on right here, and of several the most recent: others ended here in an earlier pass.
                if distance <= WINDOW:
                    rank = (stream.comes_back(run), distance > 0, -stream.stop.blocks)
                    if best is None or rank < best_rank:
                        best, best_rank = stream, rank
        return best

    def _far(self, first: int, end: int) -> Stream | None:
        """The stream that this run makes with two earlier ones in the same distance, further away than a window."""
        pair = self._strides.pop(first, None)
        if pair is None:
            return None
        older, newer = pair
        lone = all(self._young.get(stream.number) is stream and stream.runs == 1 and stream.accesses for stream in pair)
        even = newer.last[0] - older.last[0] == first - newer.last[0]  # neither has begun anew elsewhere
        if not (lone and even and older.width == newer.width == end - first):
            return None
        self._unfile(newer)
        older.take(Run(*newer.last, newer.accesses, newer.start, newer.stop), at_once=False)
        return older

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _start(self, run: Run) -> Stream:
        stream = Stream(self._next_number(), run)
        first, end = run.first, run.end
        if end - first <= WINDOW:
            for earlier in self._starts:
                step = first - earlier.last[0]
                if earlier.width == end - first and abs(step) > WINDOW:
                    self._strides[first + step] = (earlier, stream)
            while len(self._strides) > MAX_CURSORS:
                self._strides.popitem(last=False)
            self._starts.append(stream)
        return stream

    def _file(self, stream: Stream, walks: list[Walk]) -> None:
        """Puts the stream where it will be looked for, as the most recent one."""
        self._unfile(stream)
        table, limit = (self._proved, MAX_CURSORS - MAX_YOUNG) if stream.sequential else (self._young, MAX_YOUNG)
        table[stream.number] = stream
        places = tuple({block // _BUCKET for block in stream.places()})
        self._places[stream.number] = places
        for place in places:
            self._buckets.setdefault(place, {})[stream.number] = stream
        if len(table) > limit:
            self._drop(next(iter(table.values())), walks)

    def _unfile(self, stream: Stream) -> None:
        self._young.pop(stream.number, None)
        self._proved.pop(stream.number, None)
        for place in self._places.pop(stream.number, ()):
            bucket = self._buckets[place]
            del bucket[stream.number]
            if not bucket:
                del self._buckets[place]

    def _drop(self, stream: Stream, walks: list[Walk]) -> None:
        self._unfile(stream)
        self._note_end(stream)
        if (walk := stream.end()) is not None:
            walks.append(walk)

    def _note_end(self, stream: Stream) -> None:
        if stream.sequential:
            self._ended[stream.number] = stream.stop.blocks
            if len(self._ended) > MAX_CURSORS:
                self._ended.popitem(last=False)
