"""Writes the page with every error message: what it says, and what it says to do.

The messages are read from the source, so that the page cannot miss one. By the style of this house a message
says what happened, then what is allowed or what to do next; the page shows the two side by side.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src" / "meshrec"
# What happened ends where the next step begins; of "X must be Y, got Z" the rule is the next step.
_VERBS = "give|take|write|end|use|name|pass|call|rename|allowed"
_BOUNDARY = re.compile(rf"(?<=[^.])[.;?] |: (?=(?:{_VERBS})\b)|, (?=(?:allowed|or use)\b)")
_RULE = re.compile(r"(?P<rule>.*\b(?:must|need|needs|allowed)\b.*?)[,;] (?:but )?got .*", re.DOTALL)

_NEEDED = re.compile(r"\b(?:must|needs?)\b|pip install")

# What to do about messages that say only what they found.
_OF_KIND = {
    # The rooms that read files pass these on, and add what to do with a checkpoint, a package or a delta.
    "DamageError": "The file is damaged: copy it again from where it was written, or use an earlier one.",
}
_OF_ROOM = {
    "checkpoint": "That checkpoint is damaged: load the one before, as `CheckpointManager.load_latest` does.",
    "data": "Repair the file, or read with `on_error='skip'`, which counts the rows that it skips.",
    "ops": "Make the arguments agree, or let a module call the operator: it checks its input first.",
    "serve": "Correct the request, and send it on a new connection; the server keeps running.",
    "testing": "Find the first table or output that differs, and look at what the ranks do to it.",
}


class Message(NamedTuple):
    """One raise: its room, the class of the error, and its text with values named in braces."""

    room: str
    kind: str
    text: str


def messages(source: Path = SOURCE) -> Iterator[Message]:
    """Yield every error that the package raises with its own message."""
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind, text = ast.unparse(node.exc.func), _text(node.exc.args[0])
                if kind[0].isupper() and kind != "AssertionError" and text:
                    yield Message(room, kind, text)


def next_step(message: Message) -> str:
    """Return the remedy for an error; empty if there is none."""
    if message.text.endswith("{error}"):
        return "What the error that it passes on says."
    return split(message.text)[1] or _OF_KIND.get(message.kind) or _OF_ROOM.get(message.room, "")


def split(text: str) -> tuple[str, str]:
    """Split a message into what happened and what to do."""
    if rule := _RULE.fullmatch(text):
        return text, rule["rule"]
    found = _BOUNDARY.search(text)
    if found is not None:
        return text[: found.end()].strip(" ,;:"), text[found.end() :]
    return text, text if _NEEDED.search(text) else ""


def write(page: Path) -> None:
    """Write the tables, room by room."""
    rooms: dict[str, dict[str, None]] = {}
    for message in messages():
        cells = f"`{message.kind}`", _markdown(split(message.text)[0]), _markdown(next_step(message))
        rooms.setdefault(message.room, {})["| " + " | ".join(cells) + " |"] = None
    heading = "| error | what happened | what to do |\n|---|---|---|\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    tables = [f"### {room}\n\n{heading}" + "\n".join(lines) for room, lines in rooms.items()]
    page.write_text("\n\n".join(tables) + "\n")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{_name(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _name(node: ast.expr) -> str:
    """Return a short name for a value in a message."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    if isinstance(node, ast.Attribute | ast.Name | ast.Subscript | ast.Call):
        return ast.unparse(node).split("(")[0].removeprefix("self.").lstrip("_")
    return "..."


def _markdown(text: str) -> str:
    text = re.sub(r"([*_|<\[\]])", r"\\\1", text.replace("\n", " "))
    return re.sub(r"\{([^}]*)\}", r"*\1*", text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
