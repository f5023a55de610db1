"""Grouping of files: memory for files of any size and number is bounded, headers, shards and late names are handled."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from llmcache.cache.space import EXTENTS_MAX, LARGEST_EXTENT
from llmcache.mount.backends.fuse import FuseBackend
from llmcache.mount.engine.grouping import EXTENTS_ROOM, PAGED_EXTENTS, Grouping
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import SourceTree
from llmcache.mount.state.buffers import BUFFER_BYTES, BufferPool
from llmcache.mount.state.interfaces import PinStore
from llmcache.mount.state.space import SINGLE, WRITTEN_EXTENTS_MAX, LoopSpace, SpaceFile
from tests.fuzz.target import light
from tests.unit.fs_parts import MIB, new_state
from tests.unit.gguf_bytes import Gguf
from tests.unit.names_parts import blob_of, hub_snapshot, safetensors_bytes

TIB = 1 << 40
MODEL = Gguf(data_bytes=8 * MIB).tensor("blk.0.attn_q.weight", [1 << 20], 0, 0).file()
DAMAGED = b"GGUF" + b"\xff" * 100
PATIENCE_S = 60


class Watched(Backing):
    """A file of SOURCE that counts its reads and can block them."""

    def __init__(self, path: Path, name: str, writable: bool = False) -> None:
        super().__init__(f"/{name}", os.open(path, os.O_RDONLY), os.stat(path), writable)
        self.reads = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def read_into(self, address: int, size: int, offset: int) -> int:
        self.reads += 1
        self.reached.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().read_into(address, size, offset)


class Files:
    """A directory and the state of its mount."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = new_state(64 * MIB)
        self.grouping = Grouping(
            self.state, SourceTree(str(directory)), FuseBackend(self.state, cast(PinStore, None)), self.end, ("pinned*",)
        )
        self.ended: list[LoopSpace] = []

    def end(self, space: LoopSpace) -> None:
        """Dissolve the space, as the engine does."""
        self.ended.append(space)
        self.grouping.dissolve(space)

    def file(self, name: str, data: bytes = b"", size: int = 0, writable: bool = False) -> Watched:
        """Create and open a file of `data`, extended with a hole to `size` bytes, with a settled modification time."""
        path = self.directory / name
        path.write_bytes(data)
        os.truncate(path, max(size, len(data)))
        return self.opened(name, writable)

    def opened(self, name: str, writable: bool = False) -> Watched:
        """Open a file as a client would."""
        backing = Watched(self.directory / name, name, writable)
        wait = time.monotonic() + PATIENCE_S
        while not backing.identity.settled():  # a change within one clock tick would not be visible
            assert time.monotonic() < wait
            time.sleep(0.005)
        self.state.opens[backing] = 1
        return backing

    def close(self, backing: Backing) -> None:
        """End the last open of the file."""
        del self.state.opens[backing]
        _, member = self.state.owners.pop(backing)
        member.backing = None


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(
    ("size", "writable", "paged"),
    [(TIB, False, False), (TIB + 1, False, True), (16 * TIB - 4096, False, True), (16 * TIB - 4096, True, False)],
)
def test_a_file_of_any_size_takes_little_memory(files: Files, size: int, writable: bool, paged: bool) -> None:
    backing = files.file("large.bin", size=size, writable=writable)
    with light(12 * MIB):
        space, member = files.grouping.adopt(backing)
    assert space.count <= (WRITTEN_EXTENTS_MAX if writable else EXTENTS_MAX)
    assert space.paged == paged
    assert (space.extent_bytes <= LARGEST_EXTENT) or space.state(0) == SINGLE
    assert sum(space.length_of(member, extent) for extent in (0, space.count - 1)) <= 2 * space.extent_bytes
    assert space.length_of(member, space.count - 1) > 0, "the last extent is not empty"


def test_pins_and_headers_do_not_make_a_paged_file_loop(files: Files) -> None:
    backing = files.file("pinned.gguf", MODEL, size=2 * TIB)
    space, member = files.grouping.adopt(backing)
    assert space.paged and not (space.user_pinned or space.looping or space.hot)
    assert member.anatomy is not None, "its layers are known nevertheless"


def test_the_number_of_extents_of_all_files_is_bounded(files: Files) -> None:
    """Closed files are dissolved for new ones; files that still find no room are paged."""
    spaces = []
    for number in range(EXTENTS_ROOM // EXTENTS_MAX + 3):
        backing = files.file(f"{number}.bin", size=TIB)
        spaces.append(files.grouping.adopt(backing)[0])
        spaces[-1].last_ns = number
        if number == 1:
            files.close(backing)
    assert files.ended == spaces[1:2]
    assert [space.paged for space in spaces] == [False] * (len(spaces) - 2) + [True] * 2
    assert all(space.count <= PAGED_EXTENTS for space in spaces[-2:])


def test_a_paged_file_is_steered_as_soon_as_there_is_room(files: Files) -> None:
    """The file may stay open."""
    in_use = [files.file(f"{number}.bin", size=TIB) for number in range(EXTENTS_ROOM // EXTENTS_MAX)]
    spaces = [files.grouping.adopt(backing)[0] for backing in in_use]
    late = files.file("late.bin", size=TIB)
    paged = files.grouping.adopt(late)[0]
    assert paged.lacks_extents == EXTENTS_MAX and not any(space.lacks_extents for space in spaces)
    with files.state.lock:
        files.grouping.find_room()
        assert paged.alive, "other files use all extents"
        files.close(in_use[0])
        files.grouping.find_room()
    assert files.ended == [paged]
    again = files.grouping.adopt(late)[0]
    assert again.count == EXTENTS_MAX and not again.paged and not again.lacks_extents
    assert not spaces[0].alive and all(space.alive for space in spaces[1:])


@pytest.mark.parametrize("data", [MODEL, DAMAGED, b"no model"])
def test_a_header_is_read_once(files: Files, data: bytes) -> None:
    first = files.file("a.gguf", data, size=40 * MIB)
    space, member = files.grouping.adopt(first)
    assert first.reads and space.looping == (data == MODEL) == (member.anatomy is not None)
    files.close(first)
    if data == MODEL:
        again = files.opened("a.gguf")
        assert files.grouping.adopt(again) == (space, member) and again.reads == 0
        return
    with files.state.lock:
        files.end(space)
    again = files.opened("a.gguf")
    assert not files.grouping.adopt(again)[0].looping and again.reads == 0
    files.close(again)
    changed = files.file("a.gguf", MODEL)
    assert files.grouping.adopt(changed)[0].looping and changed.reads


@pytest.mark.parametrize("indexed", [False, True])
def test_shards_behind_links_are_one_loop(files: Files, indexed: bool) -> None:
    """Blobs are named by checksums; links to them or an index give their order."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    contents: dict[str, bytes | Path] = {}
    if indexed:
        names = ["part-a.safetensors", "part-b.safetensors"]
        index = {"weight_map": {str(place): name for place, name in enumerate(reversed(names))}}
        contents["model.safetensors.index.json"] = json.dumps(index).encode()
    tensors = (f"model.layers.{number}.mlp.up_proj.weight" for number in range(2))
    shards = {name: safetensors_bytes(**{tensor: 40 * MIB}) for name, tensor in zip(names, tensors, strict=True)}
    snapshot = hub_snapshot(files.directory, "org/tiny", contents | shards)
    blobs = [f"models--org--tiny/blobs/{blob_of(snapshot / name)}" for name in names]
    spaces = [files.grouping.adopt(files.opened(blob))[0] for blob in reversed(blobs)]
    assert spaces[0] is spaces[1] and [member.path for member in spaces[0].members] == [f"/{blob}" for blob in blobs]
    assert spaces[0].loop_bytes > 79 * MIB and [*spaces[0].order.extent_at] == sorted(spaces[0].order.extent_at)


@pytest.mark.parametrize("name", ["pinned.safetensors", "model-00001-of-00002.safetensors"])
def test_names_that_appear_later_count_from_the_next_open(files: Files, name: str) -> None:
    """A download reads the model for its checksum before it creates the name."""
    content = safetensors_bytes(**{"model.layers.0.mlp.up_proj.weight": 40 * MIB})
    second = {"model-00002-of-00002.safetensors": content + b"2"}
    snapshot = hub_snapshot(files.directory, "org/tiny", {name: content, **second})
    link = snapshot / name
    blob, text = f"models--org--tiny/blobs/{blob_of(link)}", os.readlink(link)
    link.unlink()
    first = files.opened(blob)
    space = files.grouping.adopt(first)[0]
    assert space.looping and not space.user_pinned
    link.symlink_to(text)
    files.grouping.tree.names.refresh(PATIENCE_S, at_once=True)
    if not name.startswith("pinned"):
        assert files.grouping.adopt(first)[0] is space and not files.ended, "it is in use"
        files.close(first)
        first = files.opened(blob)
    now = files.grouping.adopt(first)[0]
    assert files.ended == [space] and (now.user_pinned or len(now.members) == 2)


def test_a_model_with_too_many_expert_slices_is_not_a_loop(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    model = Gguf(data_bytes=140_000 * 32).tensor("blk.0.ffn_up_exps.weight", [8, 1, 140_000], 0, 0).file()
    space, _ = files.grouping.adopt(files.file("wide.gguf", model, size=40 * MIB))
    assert not space.looping and "more than 131072 expert slices" in caplog.text


def test_headers_are_read_one_at_a_time_without_blocking_other_files(files: Files) -> None:
    known = files.file("known.gguf", MODEL)
    owner = files.grouping.adopt(known)
    slow, next_one, small = files.file("a.gguf", MODEL), files.file("b.gguf", MODEL), files.file("small.txt", b"text")
    slow.go_on.clear()
    threads = [threading.Thread(target=files.grouping.adopt, args=(each,), daemon=True) for each in (slow, next_one)]
    threads[0].start()
    assert slow.reached.wait(PATIENCE_S)
    threads[1].start()
    assert files.grouping.adopt(known) == owner
    assert files.grouping.adopt(small)[0].hot
    assert files.grouping.adopt(files.file("new.kv", size=64 * MIB, writable=True))[0].written
    assert not next_one.reached.is_set()
    slow.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert next_one.reads and all(each in files.state.owners for each in (slow, next_one))


def test_a_growing_file_keeps_a_bounded_number_of_extents() -> None:
    state = new_state(1 << 40)
    member = SpaceFile("/new.kv", 0, 0, 1, node=1)
    space = LoopSpace("0", [member], 128 << 10, "written")
    state.spaces["0"] = space
    charged = 0
    with light(4 * MIB):
        for shift in range(16, 62, 3):
            space.grow(1 << shift)
            extent = space.count - 1
            state.memory.account(space, extent, 4096)
            space.partial_extents.pop(extent, None)
            space.partial_extents[extent] = shift
            charged += 4096
    assert space.count == member.count <= WRITTEN_EXTENTS_MAX and space.count * space.extent_bytes >= 1 << 61
    assert {len(each) for each in (space.status, space.accounted_bytes, space.seen_ns, space.wanted, space.order)} == {
        space.count
    }
    assert state.memory.resident_bytes == sum(space.accounted_bytes) == charged
    assert set(space.charged_extents()) == set(space.partial_extents) and set(space.status) == {SINGLE}
    assert list(space.partial_extents.values()) == sorted(space.partial_extents.values())


def test_large_and_small_buffers_share_the_pool() -> None:
    pool = BufferPool(12, 4)
    ahead = [pool.take(LARGEST_EXTENT, ahead=True) for _ in range(3)]
    assert [buffer is not None for buffer in ahead] == [True, True, False]
    small = [pool.take(BUFFER_BYTES) for _ in range(5)]
    assert [buffer is not None for buffer in small] == [True] * 4 + [False]
    for buffer in (*ahead, *small):
        if buffer is not None:
            pool.give(buffer)
    assert sum(buffer.size for buffer in pool.free) == 12 * BUFFER_BYTES
    assert [pool.take(1) is not None for _ in range(13)] == [True] * 12 + [False]
