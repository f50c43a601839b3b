"""A self-contained HTML page: tables and plots in one file, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
from jinja2 import Environment
from matplotlib.figure import Figure


@dataclass
class Table:
    """A table of strings. ``rows`` have as many entries as ``columns``."""

    columns: list[str]
    rows: list[list[str]]


@dataclass
class Section:
    """One part of a report: text paragraphs, then a table, plots (caption, figure), and quoted text (title, text)."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    table: Table | None = None
    plots: list[tuple[str, Figure]] = field(default_factory=list)
    quotes: list[tuple[str, str]] = field(default_factory=list)

    def images(self) -> list[tuple[str, str]]:
        """The plots as data URIs, with their captions."""
        return [(caption, _data_uri(figure)) for caption, figure in self.plots]


def write_report(path: Path, title: str, sections: list[Section]) -> None:
    """Write the page; the figures are closed."""
    template = files("kvfold.analysis").joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    path.write_text(page.render(title=title, sections=sections), encoding="utf-8")


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
