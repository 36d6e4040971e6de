"""Altair's specifications as SVG that stands in a page: offline, in the page's colours, nothing in it that runs."""

from __future__ import annotations

import re
from typing import Any, Final
from xml.etree import ElementTree as ET

from prunebench.analysis.forest import draw
from prunebench.errors import IntegrityError

__all__ = ["GRID", "INK", "PALETTE", "inline_svg"]

INK: Final = "#1b1f23"
GRID: Final = "#d8dce1"
"""The page's style turns both into the colours of its theme."""

PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c6d1f")
"""After Okabe and Ito: told apart with any colour vision, on light and dark; shapes say the same again."""

_TAGS: Final = frozenset(
    (
        "svg",
        "g",
        "path",
        "text",
        "tspan",
        "line",
        "rect",
        "circle",
        "defs",
        "clipPath",
        "title",
        "linearGradient",
        "stop",
    )
)


def inline_svg(specification: dict[str, Any], label: str) -> str:
    """A specification drawn, as an element for a page.

    Raises:
        PrerequisiteError: without the extra `plots`.
        IntegrityError: if the drawing held anything but shapes and text.
    """
    svg = draw(specification, "svg").strip()
    for element in ET.fromstring(svg).iter():  # noqa: S314 - drawn here, from numbers and names
        tag = str(element.tag).rpartition("}")[2]
        odd = [name for name in element.attrib if name.lower().startswith("on") or name.rpartition("}")[2] == "href"]
        if tag not in _TAGS or odd:
            raise IntegrityError(f"a drawing with {odd[0] if odd else tag}", expected="shapes and text only")
    # Sizes are the page's business: a drawing may be narrower than it was drawn.
    head, _, rest = svg.partition(">")
    width = re.search(r'width="(\d+)', head)
    style = f' style="max-width:{width[1]}px"' if width else ""
    head = re.sub(r' (width|height|class|xmlns:xlink)="[^"]*"', "", head)
    return f'<div class="plot"{style}>{head} role="img" aria-label="{label}">{rest}</div>'
