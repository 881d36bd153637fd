"""What the documents say exists: commands, options, links, names, errors, floors."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import undercrank
from tests.test_floors import FLOORS
from undercrank import cli, records, settings
from undercrank.levers import ORDER

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "undercrank"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
GENERATE_ONLY = {"-o": 1, "--output": 1, "--master": 1, "--report": 1, "--from": 1, "--reference": 1, "--quiet": 0}
"Options that `plan` lacks, and how many words follow each."


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of every fenced block in that language."""
    for path in PAGES:
        for found, text in FENCE.findall(path.read_text(encoding="utf-8")):
            if found == language:
                yield str(path.relative_to(ROOT)), text


def documented_commands() -> list[tuple[str, list[str]]]:
    """Each `undercrank ...` that a shell block or a code span shows in full, as words."""
    lines = [(name, line) for name, text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
    for path in PAGES:
        prose = FENCE.sub("", path.read_text(encoding="utf-8"))
        lines += [(str(path.relative_to(ROOT)), span) for span in re.findall(r"`(undercrank [a-z-][^`]*)`", prose)]
    split = ((name, shlex.split(line, comments=True)) for name, line in lines if line.startswith("undercrank "))
    return [(name, words[1:]) for name, words in split]


def planned(words: list[str]) -> list[str]:
    """The `generate` line as a `plan` that any machine can make."""
    rest, kept = iter(words[1:]), ["plan"]
    for word in rest:
        if word in GENERATE_ONLY:
            for _ in range(GENERATE_ONLY[word]):
                next(rest)
        elif word == "--device":
            next(rest)
        else:
            kept.append(word)
    return [*kept, "--device", "cpu"]


COMMANDS = documented_commands()
IDS = [f"{name}: {' '.join(words)}" for name, words in COMMANDS]


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=IDS)
def test_a_documented_command_exists(words: list[str]) -> None:
    """Parsed by the command's own parser: an unknown command, option or a missing argument raises."""
    top = typer.main.get_command(cli.app)
    if words[0].startswith("-"):
        assert CliRunner().invoke(cli.app, words).exit_code == 0
        return
    command = top.get_command(top.make_context("undercrank", ["models"]), words[0])  # type: ignore[attr-defined]
    assert command is not None, f"there is no command {words[0]}"
    if len(words) > 1:  # a command that is only named in a sentence needs no arguments
        command.make_context(words[0], list(words[1:]))


PLANNABLE = [(i, words) for i, (_, words) in zip(IDS, COMMANDS, strict=True) if words[0] in ("plan", "generate")]


@pytest.mark.parametrize("words", [words for _, words in PLANNABLE], ids=[i for i, _ in PLANNABLE])
def test_a_documented_clip_can_be_planned(words: list[str]) -> None:
    """Its model, size, lever and fidelity exist too."""
    answer = CliRunner().invoke(cli.app, planned(words))
    assert answer.exit_code == 0, answer.output or answer.exception


@pytest.mark.parametrize(("listing", "holds"), [("models", "flipbook"), ("levers", "host_sync")])
def test_a_listing_lists(listing: str, holds: str) -> None:
    for words in ([listing], [listing, "--json"]):
        answer = CliRunner().invoke(cli.app, words)
        assert answer.exit_code == 0 and holds in answer.output


def commands(group: Any) -> Iterator[Any]:
    """All commands, those inside groups too."""
    for command in group.commands.values():
        yield command
        if hasattr(command, "commands"):
            yield from commands(command)


def test_every_command_and_option_is_documented() -> None:
    top = typer.main.get_command(cli.app)
    names = [*top.commands]  # type: ignore[attr-defined]
    options = {o for command in commands(top) for p in command.params for o in p.opts if o[0] == "-"}
    text = page("cli.md")
    assert [name for name in names if f"| `{name}` |" not in text] == []
    assert [option for option in sorted(options) if f"`{option}`" not in text] == []


def test_every_option_that_a_page_names_exists() -> None:
    top = typer.main.get_command(cli.app)
    options = {o for c in commands(top) for p in c.params for o in p.opts} | {"--help", "--version"}
    others = {"--torch-backend"}  # uv's
    named = {option for path in PAGES for option in re.findall(r"`(--[a-z0-9-]+)", path.read_text(encoding="utf-8"))}
    assert sorted(named - options - others) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (path.parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r'"([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages - listed) == [], "add it to nav in zensical.toml"


PYTHON_BLOCKS = list(blocks("python"))


@pytest.mark.parametrize("code", [code for _, code in PYTHON_BLOCKS], ids=[name for name, _ in PYTHON_BLOCKS])
def test_documented_python_is_python_and_its_names_are_public(code: str) -> None:
    tree = ast.parse(code)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "undercrank"}
    used |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "undercrank"
        for alias in node.names
    }
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert used <= set(undercrank.__all__) | modules


def test_the_table_of_errors_is_that_of_the_records() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", page("errors.md"), re.M)
    classes = [c for c in vars(records).values() if isinstance(c, type) and issubclass(c, records.UndercrankError)]
    told = {(str(c.exit_code), c.code, c.__name__) for c in classes if c is not records.UndercrankError}
    assert set(rows) == told


def test_every_promise_and_fidelity_word_is_explained() -> None:
    words = {*records.Promise, *records.Fidelity}
    assert [word for word in words if f"| `{word}`" not in page("fidelity.md")] == []


def test_every_lever_has_its_page_and_its_row() -> None:
    row = "[`{0}`](levers/{0}.md)"
    assert [lever.name for lever in ORDER if not (ROOT / "docs" / "levers" / f"{lever.name}.md").exists()] == []
    assert [lever.name for lever in ORDER if row.format(lever.name) not in page("levers.md")] == []


def test_every_variable_of_ours_is_documented() -> None:
    named = set(re.findall(r"UNDERCRANK_\w+", Path(settings.__file__).read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if f"`{name}`" not in page("cli.md")] == []


def test_the_changes_know_this_version() -> None:
    assert f"## [{undercrank.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_floors_of_the_design_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `([\w/]+)(?:\.py)?` \|", page("design.md"), re.M)
    told = {(int(floor), name.rstrip("/")) for floor, name in rows}
    modules = {(floor, name) for floor, names in FLOORS.items() for name in names if "." not in name}
    assert told == modules - {(0, "undercrank")}
