"""Blocks of pages between markers, and what stands in them.

<!-- figures NAME: python -m tests.gpu.publish -->
...
<!-- end of figures -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kog_dist.errors import ConfigError
from tests.gpu.publish import request_tables, tables
from tests.gpu.publish.publication import Publication
from tests.gpu.publish.runs import ROOT

BLOCKS: Mapping[str, Callable[[Publication], list[str]]] = {
    "readme": tables.readme,
    "lanes": tables.lanes,
    "engines": tables.engines,
    "several": tables.several,
    "long": tables.long_contexts,
    "models": tables.models,
    "promises": request_tables.promises,
    "first-tokens": request_tables.first_tokens,
    "prompts": request_tables.prompts,
    "sampling": request_tables.sampling,
    "whole-requests": request_tables.whole_requests,
    "cancels": request_tables.cancels,
    "published": request_tables.published,
    "measured-others": request_tables.measured_others,
    "kv-cache": request_tables.kv_cache,
}
PAGES = (ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in ("results", "results-requests", "published")))
_BLOCK = re.compile(r"(<!-- figures ([\w-]+): python -m tests\.gpu\.publish -->\n).*?(<!-- end of figures -->)", re.S)


def blocks_of(text: str) -> list[str]:
    return [found[2] for found in _BLOCK.finditer(text)]


def written(page: Path, text: str, publication: Publication) -> str:
    """The page with its blocks as these results have them. Raises ConfigError for a block of an unknown name."""

    def block(found: re.Match[str]) -> str:
        if found[2] not in BLOCKS:
            raise ConfigError(f"{page}: there is no block {found[2]}; known: {', '.join(BLOCKS)}")
        lines = "\n".join(BLOCKS[found[2]](publication))
        return f"{found[1]}{lines}\n{found[3]}"

    return _BLOCK.sub(block, text)
