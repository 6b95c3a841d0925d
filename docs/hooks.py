"""What mkdocs does to pages: the command line's options come from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer

from checkflow.cli.main import app


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put each command's help in the place of the mark on the page."""
    if page.file.src_uri != "reference/cli.md":
        return markdown
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        context = type(group.make_context("checkflow", ["--help"], resilient_parsing=True))(
            command, info_name=f"checkflow {name}", max_content_width=100
        )
        parts.append(f"## checkflow {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return markdown.replace("@@CLI@@", "\n".join(parts))
