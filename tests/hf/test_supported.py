"""The supported versions. Imports nothing of the extra, so that this file is collected even if the tier cannot run."""

import pytest

from llmcache.errors import MissingRequirement
from llmcache.kv.transformers import check_transformers, check_versions


def test_the_versions_here_are_supported() -> None:
    check_versions()


@pytest.mark.parametrize("version", ["4.55.4", "6.0.0.dev0", "3.1", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(MissingRequirement, match="transformers: "):
        check_transformers(version)
