"""The guests, and their root images: built once by mmdebstrap, kept in `cache()`, and rebuilt when their inputs change.

An image is a directory with an ext4 file system of a Debian release (`root.raw`), which has systemd, an SSH server, and the
packages that llmcache needs in /opt/llmcache, and with one or two kernels of that release and their initrds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from llmcache.errors import MissingRequirement, UsageError

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
SECURITY_MIRROR = "http://deb.debian.org/debian-security"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# procps: sysctl and pgrep. strace: tier `faults` of llmcache trace. xfsprogs: tests of tests/mount.
PACKAGES = (
    "systemd-sysv,udev,dbus,openssh-server,kmod,procps,iproute2,python3,python3-venv,fuse3,libbpf1,strace,sudo,"
    "e2fsprogs,xfsprogs,initramfs-tools,zstd,linux-image-cloud-amd64"
)
# Modules of the initrd. The default, all drivers of disks, takes an emulated machine 20 s longer to load.
INITRD_MODULES = ("virtio_pci", "virtio_blk", "ext4")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")  # so that tests can run in the guest
NEEDED_BYTES = 4 * 1000**3
"""Free space that building an image takes, including what it removes at the end."""
BUILD_SECONDS = 1800
IMAGE_BYTES = 4 << 30  # sparse
EXT4 = ("-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Image:
    """A Debian release. `python`: the version of its python3. `backports`: whether to add the kernel of its backports."""

    suite: str
    python: str
    backports: bool = False


@dataclass(frozen=True)
class Guest:
    """A machine to boot: an image and one of its kernels, `suite` or `backports`."""

    name: str
    system: str
    image: Image
    kernel: str = "suite"


BOOKWORM = Image("bookworm", "3.11")
TRIXIE = Image("trixie", "3.13", backports=True)
GUESTS = {
    guest.name: guest
    for guest in (
        Guest("bookworm", "Debian 12", BOOKWORM),
        Guest("trixie", "Debian 13", TRIXIE),
        Guest("backports", "Debian 13 with the kernel of its backports, the newest in Debian", TRIXIE, "backports"),
    )
}


def guest_of(name: str) -> Guest:
    """Return the guest with this name."""
    if name not in GUESTS:
        raise UsageError(f"there is no guest {name!r}", f"the guests are {', '.join(GUESTS)}: tools/vm list")
    return GUESTS[name]


def cache() -> Path:
    """Return the directory of the images and logs: $LLMCACHE_VM, else ~/.cache/llmcache-vm."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmcache-vm"
    return Path(os.environ.get("LLMCACHE_VM") or default).absolute()


def key() -> Path:
    """Return the private key for logging in to guests; it is created once."""
    path = cache() / "key"
    if not path.exists():
        require("ssh-keygen", "openssh-client")
        cache().mkdir(parents=True, exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "llmcache-vm", "-f", path], check=True)
    return path


def require(program: str, package: str) -> None:
    """Raise MissingRequirement unless the program is installed."""
    if shutil.which(program, path=PATH) is None:
        raise MissingRequirement(f"{program} is not installed", f"apt-get install {package}")


def directory(image: Image) -> Path:
    """Return the directory of an image, whose name contains a hash of everything that determines its content."""
    hashed = hashlib.sha256(repr((image, PACKAGES, INITRD_MODULES, TESTS, mirrors(image.suite))).encode())
    for path in (Path(__file__).with_name("customize.sh"), ROOT / "requirements" / "lock.txt"):
        hashed.update(path.read_bytes())
    with contextlib.suppress(FileNotFoundError):
        hashed.update(key().with_suffix(".pub").read_bytes())
    return cache() / f"{image.suite}-{hashed.hexdigest()[:12]}"


def is_built(image: Image) -> bool:
    """Return whether the image is in the cache."""
    return (directory(image) / "root.raw").exists()


def kernel_version(guest: Guest) -> str | None:
    """Return the kernel of a guest, or None before its image is built."""
    path = directory(guest.image) / f"version.{guest.kernel}"
    return path.read_text().strip() if path.exists() else None


def mirrors(suite: str) -> list[str]:
    """Return the lines of sources.list for a suite."""
    mirror = os.environ.get("LLMCACHE_VM_MIRROR", MIRROR)
    security = os.environ.get("LLMCACHE_VM_SECURITY_MIRROR", SECURITY_MIRROR)
    options = f"[signed-by={KEYRING}]"
    return [
        f"deb {options} {mirror} {suite} main",
        f"deb {options} {security} {suite}-security main",
        f"deb {options} {mirror} {suite}-backports main",
    ]


def ensure(image: Image) -> Path:
    """Return the directory of an image, which is built first if it is missing."""
    key()
    with locked(cache() / f"{image.suite}.lock"):
        built = directory(image)
        if not is_built(image):
            check_requirements()
            build(image, built)
            for old in cache().glob(f"{image.suite}-*"):
                if old != built:
                    remove_tree(old)
    return built


def check_requirements() -> None:
    """Raise MissingRequirement if this machine cannot build an image."""
    if os.geteuid() != 0:
        raise MissingRequirement("building an image needs root (chroot)", f"sudo LLMCACHE_VM={cache()} tools/vm build")
    require("mmdebstrap", "mmdebstrap")
    require("mke2fs", "e2fsprogs")
    if not Path(KEYRING).exists():
        raise MissingRequirement(f"{KEYRING} is missing", "apt-get install debian-archive-keyring")
    free = shutil.disk_usage(cache()).free
    if free < NEEDED_BYTES:
        raise MissingRequirement(
            f"building an image needs {NEEDED_BYTES / 1e9:.0f} GB in {cache()}, which has {free / 1e9:.1f} GB",
            "set LLMCACHE_VM to a directory with more space",
        )


def build(image: Image, built: Path) -> None:
    """Build an image. The directory gets its final name when it is complete."""
    scratch = built.with_name(f"{image.suite}.new")
    root, wheels, raw, log = scratch / "root", scratch / "wheels", scratch / "root.raw", cache() / f"{image.suite}.build"
    remove_tree(scratch)
    wheels.mkdir(parents=True)
    log.unlink(missing_ok=True)
    say(f"building the image of {image.suite}, 2 to 5 minutes; the log is {log}")
    try:
        download_packages(image, wheels, log)
        variables = {
            "OUT": str(scratch),
            "WHEELS": str(wheels),
            "KEY": str(key().with_suffix(".pub")),
            "BACKPORTS": f"{image.suite}-backports" if image.backports else "",
        }
        command = [
            *("mmdebstrap", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", "--format=directory", "--quiet"),
            *('--aptopt=Acquire::Languages "none"', "--aptopt=Acquire::Retries 3"),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")),
            '--essential-hook=mkdir -p "$1/etc/initramfs-tools/conf.d"',
            '--essential-hook=printf "MODULES=list\\nCOMPRESS=zstd\\n" >"$1/etc/initramfs-tools/conf.d/guest"',
            f'--essential-hook=printf "%s\\n" {" ".join(INITRD_MODULES)} >"$1/etc/initramfs-tools/modules"',
            f'--customize-hook={Path(__file__).with_name("customize.sh")} "$1"',
            *(image.suite, str(root), *mirrors(image.suite)),
        ]
        run_logged(command, log, f"cannot build the image of {image.suite}", variables)
        with raw.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run_logged(["mke2fs", *EXT4, "-d", str(root), str(raw)], log, f"cannot write {raw}")
        remove_tree(root)
        remove_tree(wheels)
        scratch.rename(built)
    finally:
        remove_tree(scratch)


def download_packages(image: Image, wheels: Path, log: Path) -> None:
    """Download the wheels that llmcache and its tests need, in the pinned versions, for the Python of an image."""
    requirements = [one for one in metadata.requires("llmcache-toolkit") or () if "extra ==" not in one]
    command = [
        *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"),
        *("--python-version", image.python, "-d", str(wheels), "-c", str(ROOT / "requirements" / "lock.txt")),
        *(*requirements, *TESTS),
    ]
    run_logged(command, log, "cannot download the packages of llmcache")


def run_logged(command: Sequence[str], log: Path, failure: str, variables: Mapping[str, str] | None = None) -> None:
    """Run a command and append its output to a file; raise MissingRequirement with its last line if it fails."""
    environment = {**os.environ, "PATH": PATH, **(variables or {})}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | str = process.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"no end after {BUILD_SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # makes mmdebstrap unmount the file systems in the root directory
                process.wait()
    if code:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise MissingRequirement(
            f"{failure}: {Path(command[0]).name}: {lines[-1] if lines else code}",
            f"the rest is in {log}; this needs the network",
        )


def remove_tree(path: Path) -> None:
    """Remove a directory, unless something is mounted below it."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if any(Path(one).is_relative_to(path) for one in mounted):
        raise MissingRequirement(f"something is mounted below {path}", "unmount it")
    if path.exists():
        shutil.rmtree(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that two runs do not build one image at once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"tools/vm: {text}", file=sys.stderr, flush=True)
