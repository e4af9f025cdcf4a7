"""A file of settings: from bytes to a configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.config import resolve
from kog_dist.errors import ConfigError
from tests.fuzz.refusals import refused

PATH = Path(tempfile.mkdtemp()) / "settings.toml"


def one_input(data: bytes) -> None:
    """Settings, or ConfigError."""
    PATH.write_bytes(data)
    with refused(ConfigError):
        resolve({}, {}, PATH).describe()
