"""Pages of the site that the repository has in another form: README.md is its front, docs/adr/ gets a list."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add `index.md` and `adr/index.md`."""
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text("utf-8")
    # Links of the repository's root are links of docs/; their texts lose the folder as well.
    front = re.sub(r"\[docs/([\w./-]+)\]\(docs/([\w./#-]+)\)", r"[\1](\2)", readme).replace("](docs/", "](")
    front = front.replace("[adr/](adr/)", "[adr/](adr/index.md)")
    files.append(File.generated(config, "index.md", content=front))
    rows = []
    for page in sorted((ROOT / "docs/adr").glob("*.md")):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
        number, _, text = title.partition(". ")
        rows.append(f"| [{int(number)}]({page.name}) | {text} |")
    listed = "# Decisions\n\nEach page has the context, the choice, the alternatives and the consequences.\n\n"
    files.append(File.generated(config, "adr/index.md", content=listed + "| | |\n|---|---|\n" + "\n".join(rows) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point what links to README.md at the front page, and write a pipe in code as Python's Markdown reads it."""
    markdown = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), markdown)
    return re.sub(r"\]\((?:\.\./)+README\.md", "](" + "../" * page.file.src_uri.count("/") + "index.md", markdown)
