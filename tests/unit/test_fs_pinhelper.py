"""Which mounts the pin helper gives up in its own namespace, and what it opens."""

from __future__ import annotations

import os
from pathlib import Path

from llmcache.fs.backends.pinhelper import Helper, others

MOUNTINFO = rb"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /dev rw - devtmpfs devtmpfs rw
30 22 8:1 / /media/usb\040disk rw - ext4 /dev/sda1 rw
31 22 0:40 / /mnt rw - tmpfs tmpfs rw
32 31 0:50 / /mnt/models rw - fuse.llmcachefs llmcachefs rw
33 31 0:51 / /mnt/models-2 rw - fuse.llmcachefs llmcachefs rw
34 32 0:52 / /mnt/models/inside rw - tmpfs tmpfs rw
""".lstrip()


def test_all_but_the_way_to_the_mount_point_is_given_up_last_first() -> None:
    expected = [b"/mnt/models/inside", b"/mnt/models-2", b"/media/usb disk", b"/dev"]
    assert others(MOUNTINFO, b"/mnt/models") == expected, "and not the root"
    assert len(others(MOUNTINFO, b"/elsewhere")) == 6


def test_only_regular_files_below_the_mount_are_opened_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x" * 5000)
    mount = tmp_path / "mnt"
    (mount / "dir").mkdir(parents=True)
    (mount / "dir" / "file").write_bytes(b"x" * 4096)
    (mount / "way").symlink_to(tmp_path / "outside")
    (mount / "link").symlink_to("dir/file")
    os.mkfifo(mount / "pipe")
    helper = Helper(str(mount))
    assert helper.handle({"op": "attach", "path": "/dir/file"}) == {
        "node": (mount / "dir" / "file").stat().st_ino,
        "size": 4096,
    }
    for path in ("/way/file", "/link", "/pipe", "/dir", "/none"):
        reply = helper.handle({"op": "attach", "path": path})
        assert list(reply) == ["errno"], path
    helper.handle({"op": "detach", "path": "/dir/file"})
