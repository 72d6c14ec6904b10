"""Writes docs/BENCHMARKS.md from the result files.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import REPOSITORY, RESULTS, Table

ORDER = (
    "aba",
    "copies",
    "proxy_time",
    "health_lag",
    "page",
    "perplexity",
    "cpu_weights",
    "indexer",
    "latents",
    "draft",
    "checkpoint_cost",
)
PAGE = REPOSITORY / "docs" / "BENCHMARKS.md"
PICTURES = {
    "aba": "return-by-prompt",
    "policies": "hit-share-by-budget",
    "llama_cpp": "turns-by-server",
    "schedule": "waits-by-schedule",
}
"""Result file -> its picture (`benchmarks.pictures`)."""
HEAD = """# Benchmarks

`python -m benchmarks.tables` generates this page from the files under `benchmarks/results/`, which contain every single
measurement. `make bench` runs all measurements that the machine supports again and rewrites both. Missed goals stay in
the tables.
"""


def section(document: dict[str, Any]) -> str:
    """Results first, then how they were measured."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [f"## {document['title']}"]
    if document["goals"]:
        rows = tuple(
            (goal["claim"], goal["bound"], goal["measured"], "met" if goal["met"] else "**missed**")
            for goal in document["goals"]
        )
        parts.append(Table("", ("claim", "goal", "measured", ""), rows).markdown())
    picture = PICTURES.get(document["name"])
    if picture is not None:
        parts.append(f"![{document['title']}](pictures/{picture}.svg)")
    for table in document["tables"]:
        rows = tuple(tuple(row) for row in table["rows"])
        parts += [f"**{table['title']}**", Table(table["title"], tuple(table["columns"]), rows).markdown()]
    parts += [
        f"How: {document['how']}",
        f"`{document['command']}`, {document['measured_on']}, commit {document['commit']}. {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; load average before the start "
        f"{machine['load_average_1m']}. Python {machine['python']}, {versions}.",
    ]
    if document["notes"]:
        parts.append("\n".join(f"- {note}" for note in document["notes"]))
    return "\n\n".join(parts)


def page() -> str:
    """The page: sections in ORDER, then all other results by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    names = [name for name in ORDER if name in found] + [name for name in found if name not in ORDER]
    return "\n\n".join([HEAD.rstrip(), *(section(found[name]) for name in names)]) + "\n"


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
