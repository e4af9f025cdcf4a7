"""Markdown that people can read and follow: line lengths, links, anchors, paths of files, and lengths of pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kog_dist import config, env
from tests import settings_page

ROOT = Path(__file__).parents[2]
COLUMNS = 120
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "kog_dist").rglob("*.md"),
    ]
)
_SHORT = ("results", "monokernel", "prefill", "kccl", "launchers", "plan", "architecture")
LIMITS = {
    "README.md": 100,
    "docs/results-requests.md": 240,
    **{
        f"docs/{name}.md": 200
        for name in ("results", "results-requests", "monokernel", "prefill", "kccl", "launchers", "plan", "architecture")
    },
}
FOLDERS = "kog_dist|collectives|workers|launch|tests|configs|docs"
CODE = {".py", ".c", ".cu", ".cuh", ".js", ".css", ".html"}
_SET_BY_US = {"RAY_IGNORE_UNHANDLED_ERRORS"}  # no setting: a process gives it to itself
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(text: str) -> list[tuple[int, str]]:
    """Numbered lines outside of code blocks."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            found.append((number, line))
    return found


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    found: set[str] = set()
    for _, line in _prose(text):
        if heading := re.match(r"#{1,6} (.+)", line):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            same = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
            found.add(f"{slug}-{same}" if same else slug)
    return found


def long_lines(text: str) -> list[int]:
    """Lines above the limit; a row of a table, and a word that cannot be broken, may be longer."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and " " in line.strip().removeprefix("- ")
    ]


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file or no heading."""
    dead = []
    for _, line in _prose(text):
        for link in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))):
                dead.append(link)
    return dead


def lost_files(text: str) -> list[str]:
    """Files named in backticks that are not in the repository."""
    found = [name for _, line in _prose(text) for name in _FILE.findall(line)]
    return [name for name in found if not (ROOT / name).exists() and not Path(name).stem.isupper()]  # TARGET: any


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_fit(page: Path) -> None:
    assert long_lines(page.read_text(encoding="utf-8")) == [], f"lines of more than {COLUMNS} columns"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "history" not in page.parts], ids=_name)
def test_named_files_exist(page: Path) -> None:
    assert lost_files(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", LIMITS)
def test_pages_stay_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LIMITS[name]


def test_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {(ROOT / link.partition("#")[0]).resolve() for link in _LINK.findall(readme) if "://" not in link}
    assert {page.name for page in (ROOT / "docs").glob("*.md") if page not in named} == set()


def test_sources_name_pages_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("kog_dist", "collectives", "workers", "launch", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cu", ".cuh"} and path.is_file()
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert missing == []


def test_engine_is_as_large_as_architecture_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Where is the engine")[2]
    rows = re.findall(r"^\| \**([\d,]+)\** \| ([^|]+) \|", text, re.M)
    assert len(rows) >= 10
    for said, folders in rows:
        names = re.findall(r"`([^`]+)`", folders)
        paths = [path for name in names for path in (ROOT.glob(name) if "*" in name else (ROOT / name).rglob("*"))]
        counted = sum(len(path.read_bytes().splitlines()) for path in paths if path.suffix in CODE and path.is_file())
        assert abs(counted - int(said.replace(",", ""))) <= counted / 5, f"{folders} have {counted:,} lines, not {said}"


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (
        "# A title: `x` of two\n\n[a](#a-title-x-of-two) [b](#b) [c](missing.md)\n\n" + "word " * 30 + "\n| " + "x " * 90 + "|\n"
    )
    page.write_text(text, encoding="utf-8")
    assert dead_links(page, text) == ["#b", "missing.md"]
    assert long_lines(text) == [5]
    assert lost_files("`kog_dist/errors.py` and `workers/nonsense.py`") == ["workers/nonsense.py"]


def test_settings_page_is_what_the_code_says() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), "run python -m tests.settings_page"


def test_settings_page_has_every_variable_that_is_read() -> None:
    known = {name for names in settings_page.VARIABLES for name in names.split(", ")} | set(map(env.variable, config.SETTINGS))
    sources = [path for folder in ("kog_dist", "workers", "launch") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if "train" not in path.parts)
    assert set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"\)?', text)) - _SET_BY_US <= known
