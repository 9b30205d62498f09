"""Write the map of the house: the rooms on their floors, as the architecture test lists them.

The line about a room is the first paragraph of its docstring, so the map and the code cannot disagree.
"""

import ast
import html
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "meshrec"

_INTRO = """# The map of the house

`src/meshrec` has a folder per room. Each floor imports floors below it only, and a test holds that
(`tests/test_architecture.py`). Read it from the bottom if you want to know how things work, and from the
top if you want to know what they are for. C++ kernels are in `csrc/`, a folder per op of `ops/`.

Three things are followed through it: {doc}`a batch <../guides/how-a-batch-flows>`,
{doc}`a checkpoint <../guides/how-a-checkpoint-is-made>` and
{doc}`a request <../guides/how-a-request-is-answered>`.
"""
_WIDTH, _HEIGHT, _GAP = 760, 34, 8


def floors_of(test: Path) -> list[list[str]]:
    """Read the rooms of each floor from the architecture test, the highest floor first."""
    for node in ast.parse(test.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return [sorted(floor) for floor in reversed(ast.literal_eval(node.value))]
    raise ValueError(f"{test} assigns no FLOORS. Name the list of floors so.")


def sentence(room: str) -> str:
    """Return the first paragraph of a room's docstring as one line."""
    path = SOURCE / room.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def page(room: str) -> str:
    """Return the name of a room, with a link if it has a page."""
    has_page = (ROOT / "docs" / "rooms" / f"{room}.md").is_file()
    return f"{{doc}}`{room} <../rooms/{room}>`" if has_page else f"`{room}`"


def picture(floors: list[list[str]]) -> str:
    """Draw the floors as an SVG, the highest on top."""
    parts = []
    for number, rooms in enumerate(floors):
        width = (_WIDTH - _GAP * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            x, y = place * (width + _GAP), number * (_HEIGHT + _GAP)
            parts.append(
                f'<g><title>{html.escape(sentence(room))}</title><rect x="{x:.0f}" y="{y}" '
                f'width="{width:.0f}" height="{_HEIGHT}" rx="4" fill="none" stroke="currentColor"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 22}" text-anchor="middle" fill="currentColor" '
                f'font-size="14">{html.escape(room)}</text></g>'
            )
    height = len(floors) * (_HEIGHT + _GAP)
    return (
        f'<svg viewBox="-2 -2 {_WIDTH + 4} {height}" role="img" '
        f'aria-label="The floors of the house">{"".join(parts)}</svg>'
    )


def main(out: Path) -> None:
    """Write the page."""
    floors = floors_of(ROOT / "tests" / "test_architecture.py")
    rows = [f"| {page(room)} | {sentence(room)} |" for floor in floors for room in floor]
    lines = [_INTRO, "```{raw} html", picture(floors), "```", "", "| room | what it is |", "|---|---|", *rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
