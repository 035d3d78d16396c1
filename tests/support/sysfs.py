"""Builds the /sys of recorded hosts (tests/data/sysfs) in a folder."""

from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "data" / "sysfs"


def lines_of(name: str) -> list[str]:
    """Return the lines of a recording, without comments and empty lines."""
    text = (RECORDINGS / f"{name}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def build_sys(root: Path, lines: list[str]) -> Path:
    """Create the files and links of a recording under `root`, and return `root`."""
    for line in lines:
        name, link, content = line.partition(" -> ")
        if not link:
            name, _, content = line.partition(" = ")
        path = root / name.removesuffix(" =")
        path.parent.mkdir(parents=True, exist_ok=True)
        if link:
            path.symlink_to(content)
        else:
            path.write_text(content + "\n", encoding="utf-8")
    return root
