"""The frame of every page: text escaped, one style, one script known by its hash, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib import resources
from typing import Final

__all__ = ["cell_html", "page", "text_html"]

PAGES: Final = (("index.html", "Board"), ("plots.html", "Plots"), ("contrasts.html", "Contrasts"))


def text_html(text: object) -> str:
    """Text that HTML shows as it is, in content and in quoted attributes."""
    return html.escape(str(text), quote=True)


def cell_html(text: str, detail: str = "", *, strong: bool = False) -> str:
    """A text, emphasised or not, with its smaller second part."""
    main = f"<b>{text_html(text)}</b>" if strong else text_html(text)
    return main + (f"<small>{text_html(detail)}</small>" if detail else "")


@cache
def _file(name: str) -> str:
    return resources.files("prunebench.board").joinpath(name).read_text(encoding="utf-8")


def page(title: str, body: str, *, here: str = "", up: str = "", script: bool = False) -> str:
    """A whole page.

    Args:
        title: of the page, as text.
        body: its main content, as HTML.
        here: its own file, if it is in the navigation.
        up: how to get to the site's folder, such as "../".
        script: whether it has the board's script; where it has none, none runs.
    """
    code = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {allowed}base-uri 'none'; form-action 'none'"
    links = "".join(
        f'<a href="{up}{file}"{" aria-current=page" if file == here else ""}>{name}</a>' for file, name in PAGES
    )
    tail = f"<script>{code}</script>\n" if script else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text_html(title)}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<header><nav aria-label="Pages">{links}</nav></header>
<main>
{body}
</main>
{tail}</body>
</html>
"""
