"""Draws boxes, arrows and rows of tokens as SVG, with a background of its own, so that it is readable on any page."""

from __future__ import annotations

from html import escape

INK, PALE, LINE = "#1f2933", "#f4f6f8", "#7b8794"
TRAINED, CONTEXT, CODE = "#8ed1a7", "#e4e7eb", "#cfe3f7"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


class Drawing:
    """Shapes in the order they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, fill: str = PALE) -> None:
        """A rectangle with centred lines of text; the first is bold where there are several."""
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5' fill='{fill}' stroke='{LINE}'/>"
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            middle = y + height / 2 + 4 + (i - (len(lines) - 1) / 2) * 16
            self.text(x + width / 2, middle, line, anchor="middle", bold=len(lines) > 1 and i == 0)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, size: int = 12) -> None:
        """One line; x is its start, middle or end."""
        weight = " font-weight='bold'" if bold else ""
        self._shapes.append(
            f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' fill='{INK}' text-anchor='{anchor}'{weight}>"
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with a head at the last."""
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g},{y:g}" for i, (x, y) in enumerate(points))
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self._shapes.append(
            f"<path d='{path}' fill='none' stroke='{INK}' stroke-width='1.4' marker-end='url(#head)'{dash}/>"
        )

    def area(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """A dashed frame around several boxes, with its title above them."""
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='8' fill='none' stroke='{LINE}' "
            "stroke-dasharray='3 3'/>"
        )
        self.text(x + 20, y + 20, title, bold=True)

    def tokens(self, x: float, y: float, row: str, *, size: int = 26) -> None:
        """A row of tokens; those in square brackets are trained: `1 2 [3] 4 [5]`."""
        for i, token in enumerate(row.split()):
            fill = TRAINED if token.startswith("[") else CONTEXT
            self.box(x + i * (size + 2), y, size, size, token.strip("[]"), fill)

    def svg(self) -> str:
        """The file's text."""
        width, height = self._size
        head = (
            "<marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
            f"<path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker>"
        )
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
                f"height='{height}' role='img'>",
                f"<title>{escape(self._title)}</title>",
                f"<defs>{head}</defs>",
                f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>",
                *self._shapes,
                "</svg>",
                "",
            ]
        )
