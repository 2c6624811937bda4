"""What the documentation says exists does exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def definitions(path: Path) -> set[str]:
    """Names of the functions, classes and methods of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_the_architecture_page_names_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", text)
    assert len(links) > 30
    for name, file in links:
        assert name in definitions(ROOT / file), f"{file} defines no {name}"


def test_the_architecture_page_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hgrn_vision").rglob("*/*.py")}
    assert {f"`{folder}/`" for folder in folders} <= set(re.findall(r"`[\w/]+/`", text))


def test_links_to_files_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())]
    links = [(page, target) for page, target in links if "://" not in target]
    assert {ROOT / "README.md", ROOT / "docs" / "architecture.md"} <= {page for page, _ in links}
    for page, target in links:
        assert (page.parent / target).exists(), f"{page} links {target}"
