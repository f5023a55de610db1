"""The command line of tools/vm."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from llmcache.errors import LlmcacheError, UsageError

from . import images
from .checks import CHECKS
from .compare import compare
from .machine import COMMAND_SECONDS, Settings, booted
from .nightly import nightly


def main(arguments: list[str]) -> int:
    """Run a command of tools/vm; return its exit code, for `run` that of the command in the guest."""
    # Cleanup must also run when a supervisor ends this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    words: list[str] = []
    if "--" in arguments:
        position = arguments.index("--")
        arguments, words = arguments[:position], arguments[position + 1 :]
    args = parser().parse_args(arguments)
    try:
        return run_command(args, words)
    except LlmcacheError as error:
        print(f"tools/vm: error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tools/vm: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="tools/vm", description="Boot kernels of Debian in QEMU, and check llmcache in them.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the guests")
    build = commands.add_parser("build", help="build missing images")
    build.add_argument("names", nargs="*", metavar="NAME", help="a guest; default: all")
    run = commands.add_parser("run", help="run a command in a guest", usage="tools/vm run NAME [options] -- COMMAND…")
    run.add_argument("name", metavar="NAME")
    run.add_argument(
        "--timeout", type=float, default=COMMAND_SECONDS, metavar="SECONDS", help="end the command then, with status 124"
    )
    add_settings(run)
    checks = commands.add_parser("nightly", help="check llmcache in guests")
    checks.add_argument("names", nargs="*", metavar="NAME", help="a guest; default: all")
    checks.add_argument("--only", action="append", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    add_json(checks)
    add_settings(checks)
    cells = commands.add_parser("compare", help="compare bytes from storage with and without MGLRU")
    cells.add_argument("name", metavar="NAME")
    cells.add_argument("--only", choices=("dense", "moe"), help="default: both")
    cells.add_argument("--scale", default="1", metavar="X", help="size of the files, relative to the default")
    add_json(cells)
    add_settings(cells)
    return top


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option of a file with the results."""
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add the options of the virtual machine."""
    command.add_argument("--memory", type=int, default=Settings.memory, metavar="MiB", help="default: %(default)s")
    command.add_argument("--cpus", type=int, default=Settings.cpus, metavar="N", help="default: %(default)s")
    command.add_argument("--mglru", choices=("on", "off"), help="default: as the guest's kernel decides; compare: both")


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the virtual machine that the options describe."""
    mglru = {"on": True, "off": False, None: None}[args.mglru]
    return Settings(args.memory, args.cpus, mglru)


def run_command(args: argparse.Namespace, words: list[str]) -> int:
    """Run the command that `args` names."""
    if words and args.command != "run":
        raise UsageError(f"tools/vm {args.command} takes no command", "tools/vm run NAME -- COMMAND…")
    if args.command == "list":
        return show_guests()
    if args.command == "build":
        for guest in [images.guest_of(name) for name in args.names or images.GUESTS]:
            images.ensure(guest.image)
        return show_guests()
    if args.command == "nightly":
        guests = [images.guest_of(name) for name in args.names or images.GUESTS]
        return nightly(guests, settings_of(args), args.only or list(CHECKS), args.json)
    if args.command == "compare":
        guest, options = images.guest_of(args.name), ["--scale", args.scale, *([args.only] if args.only else [])]
        return compare(guest, settings_of(args), options, args.json)
    if not words:
        raise UsageError("no command is given", "tools/vm run NAME -- COMMAND…")
    with booted(images.guest_of(args.name), settings_of(args)) as machine:
        return machine.run(words, args.timeout)


def show_guests() -> int:
    """Print a line for each guest."""
    print(f"{'name':<12}{'kernel':<28}system")
    for guest in images.GUESTS.values():
        print(f"{guest.name:<12}{images.kernel_version(guest) or 'not built yet':<28}{guest.system}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
