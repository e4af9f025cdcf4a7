"""Which packages may be trained on: only those whose own metadata names a permissive licence and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from kog_dist.records import dataclass

PERMISSIVE = frozenset(
    """0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Open-MPI BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU
    NCSA PSF-2.0 Python-2.0 Unlicense X11 Zlib""".split()
) | {"Apache-2.0 WITH LLVM-exception"}
_BY_ID = {name.lower(): name for name in PERMISSIVE}
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
_SHORT_FORMS = (  # what people write into the free `License` field, matched against the whole field
    (r"(the )?mit( license)?", "MIT"),
    (r"(the )?(new |modified )?bsd( license)?|(3-clause bsd|bsd[ -]3[ -]clause|bsd-3)( license)?", "BSD-3-Clause"),
    (r"(2-clause bsd|bsd[ -]2[ -]clause)( license)?", "BSD-2-Clause"),
    (r"(the )?apache([ -]software)?( license)?[ ,-]*(v|version)? ?2(\.0)?( license)?", "Apache-2.0"),
    (r"isc( license)?", "ISC"),
    (r"psf(l|-2\.0)?|python software foundation license", "PSF-2.0"),
)
_TEXTS = (  # sentences that only these licences contain
    ("Permission is hereby granted, free of charge, to any person obtaining a copy", "MIT"),
    ("Redistribution and use in source and binary forms, with or without modification, are permitted", "BSD-3-Clause"),
    ("Apache License Version 2.0, January 2004", "Apache-2.0"),
    ("Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee", "ISC"),
)
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying)([-_.].*)?$", re.IGNORECASE)
_COPYLEFT = re.compile(r"GNU (LESSER |AFFERO )?GENERAL PUBLIC|Mozilla Public|proprietary|Eclipse Public", re.IGNORECASE)


@dataclass(frozen=True)
class LicenceFinding:
    """licence: SPDX, or None if something is not permissive or nothing is known. evidence: where it stands, what it says."""

    licence: str | None
    evidence: str


def permissive_licence(distribution: Distribution) -> LicenceFinding:
    """The SPDX licence of an installed package if all of it is permissive by its own metadata.

    Looks at License-Expression, else the licence classifiers, else the License field, else the licence files; the first that
    is present decides.
    """
    metadata = distribution.metadata
    expression = _field(distribution, "License-Expression")
    if expression:
        return LicenceFinding(evaluate(expression), f"License-Expression: {expression}")
    named = [c.rsplit(" :: ", 1)[1] for c in metadata.get_all("Classifier") or () if c.startswith("License :: ")]
    named = [name for name in named if name not in ("OSI Approved", "DFSG approved")]
    if named:
        known = [_CLASSIFIERS.get(name) for name in named]
        return LicenceFinding(_joined(known), f"classifiers: {', '.join(named)}")
    stated = _field(distribution, "License")
    if 0 < len(stated) < 80:
        return LicenceFinding(_short_form(stated), f"License: {stated}")
    if stated:
        return LicenceFinding(_recognise(stated), "text in License")
    files = metadata.get_all("License-File") or []
    return _finding_of_texts({name: _read(distribution, name) for name in files})


def licence_of_folder(folder: Path) -> LicenceFinding:
    """The SPDX licence that the licence files at the top of a folder hold, if each of them is permissive."""
    files = [path for path in sorted(folder.glob("*")) if path.is_file() and _LICENCE_FILE.match(path.name)]
    return _finding_of_texts({path.name: path.read_text(encoding="utf-8", errors="replace") for path in files})


def _finding_of_texts(texts: Mapping[str, str]) -> LicenceFinding:
    return LicenceFinding(_joined([_recognise(text) for text in texts.values()]), f"licence files: {', '.join(texts) or 'none'}")


def _joined(licences: Sequence[str | None]) -> str | None:
    """All of them; None if one is unknown or there are none."""
    return " AND ".join(sorted({name for name in licences if name})) if licences and all(licences) else None


def _field(distribution: Distribution, name: str) -> str:
    """A metadata field, empty if it is missing."""
    return str((distribution.metadata.get_all(name) or [""])[0]).strip()


def evaluate(expression: str) -> str | None:
    """The part of an SPDX expression that may be chosen: every AND operand permissive, one OR operand enough; else None."""
    while "(" in expression:
        expression, num_groups = re.subn(r"\(([^()]*)\)", lambda match: evaluate(match[1]) or "refused", expression)
        if not num_groups:
            return None
    for alternative in re.split(r"\s+or\s+", expression, flags=re.IGNORECASE):
        operands = [_BY_ID.get(name.strip().lower()) for name in re.split(r"\s+and\s+", alternative, flags=re.IGNORECASE)]
        if all(operands):
            return " AND ".join(sorted({name for name in operands if name}))
    return None


def _short_form(text: str) -> str | None:
    for pattern, licence in _SHORT_FORMS:
        if re.fullmatch(pattern, text, flags=re.IGNORECASE):
            return licence
    return evaluate(text)


def _recognise(text: str) -> str | None:
    flat = " ".join(text.split())
    if _COPYLEFT.search(flat):
        return None
    return next((licence for sentence, licence in _TEXTS if sentence in flat), None)


def _read(distribution: Distribution, name: str) -> str:
    return distribution.read_text(f"licenses/{name}") or distribution.read_text(name) or ""
