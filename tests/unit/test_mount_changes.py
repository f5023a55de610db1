"""Changes below SOURCE are noticed by inotify; where it may miss some, the watch is not complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmcache.mount import changes
from llmcache.mount.changes import SourceChanges
from llmcache.procfs import fstype_at


class Tree:
    """A directory with a file and a subdirectory, and its watch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "sub").mkdir()
        (path / "sub" / "file").write_bytes(b"x")
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.watch = SourceChanges(self.fd)

    def walk(self, is_whole: bool = True) -> None:
        self.watch.begin()
        for *_, fd in os.fwalk(".", dir_fd=self.fd):
            self.watch.visit(fd)
        self.watch.end(is_whole)

    def settled(self) -> None:
        """Walk until no change is reported, as a mount does."""
        for _ in range(3):
            self.walk()
            if not self.watch.take():
                return
        raise AssertionError("changes are reported without a change")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(changes, "LOCAL", {fstype_at(tmp_path)})
    made = Tree(tmp_path)
    yield made
    made.watch.close()
    os.close(made.fd)


def rewrite(path: Path) -> None:
    path.write_bytes(b"other")


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda path: rewrite(path / "sub" / "new"),
    "write": lambda path: rewrite(path / "sub" / "file"),
    "truncate": lambda path: os.truncate(path / "sub" / "file", 0),
    "touch": lambda path: os.utime(path / "sub" / "file", (0, 0)),
    "delete": lambda path: (path / "sub" / "file").unlink(),
    "rename": lambda path: (path / "sub" / "file").rename(path / "file"),
    "rename a directory": lambda path: (path / "sub").rename(path / "other"),
    "link": lambda path: (path / "sub" / "link").symlink_to("file"),
    "create a directory": lambda path: (path / "new").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_reported_once(tree: Tree, change: Callable[[Path], object]) -> None:
    tree.settled()
    assert tree.watch.is_complete and not tree.watch.take()
    change(tree.path)
    assert tree.watch.take()
    tree.settled()
    for directory in (tree.path, *(path for path in tree.path.rglob("*") if path.is_dir())):
        rewrite(directory / "last")
        assert tree.watch.take(), "later changes are reported, too"


def test_reads_are_not_reported(tree: Tree) -> None:
    tree.settled()
    (tree.path / "sub" / "file").read_bytes()
    list(tree.path.iterdir())
    assert not tree.watch.take()


def test_a_directory_that_has_left_the_tree_is_no_longer_watched(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree.settled()
    outside = tmp_path_factory.mktemp("outside") / "sub"
    (tree.path / "sub").rename(outside)
    tree.settled()
    rewrite(outside / "file")
    assert not tree.watch.take()


def test_too_many_directories_or_a_partial_walk_make_the_watch_incomplete(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.settled()
    tree.walk(is_whole=False)
    assert not tree.watch.is_complete
    monkeypatch.setattr(changes, "WATCHES_MAX", 1)
    tree.walk()
    assert not tree.watch.is_complete
    monkeypatch.undo()
    tree.settled()
    assert tree.watch.is_complete


def test_a_network_file_system_is_never_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "fstype_at", lambda _path: "nfs4")
    tree = Tree(tmp_path)
    tree.walk()
    assert tree.watch.fd is None and not tree.watch.is_complete
