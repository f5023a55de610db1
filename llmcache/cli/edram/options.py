"""What several commands for the modelled accelerator take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from llmcache.cli import types


def profile_option(
    default: str = "paper,silicon", about: str = "Energies; also: public."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--profile`: names of profiles, commas between them."""
    return click.option(
        "--profile",
        type=types.NameType("all", table="llmcache.edram.constants:PROFILES"),
        default=default,
        show_default=True,
        help=about,
    )
