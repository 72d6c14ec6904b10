"""What a server might tell the page, made up: any number of conversations in families, and a week of turns."""

from __future__ import annotations

import random
from typing import Any

MIB = 1 << 20
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;<b>bold</b>"
DAY_S = 86_400


def conversations(count: int, *, words: bool = False, seed: int = 1) -> dict[str, Any]:
    """Families of forks: every fourth begins a family."""
    dice, made = random.Random(seed), list[dict[str, Any]]()
    for number in range(count):
        parent = made[dice.randrange(max(0, number - 6), number)] if number % 4 else None
        tokens = dice.randrange(900, 42_000) + (0 if parent is None else parent["tokens"] // 2)
        shared = 0 if parent is None else min(parent["tokens"], tokens) * 3 // 4
        made.append(
            {
                "id": f"{number:04x}{dice.getrandbits(48):012x}",
                "live": number == 0,
                "parent": None if parent is None else parent["id"],
                "shared_tokens": shared,
                "tokens": tokens,
                "bytes": {
                    "ram": 0 if number % 9 == 5 else tokens * 12_288,
                    "disk": tokens * 12_288 if number % 3 else 0,
                },
                "checkpoints": dice.randrange(0, 9),
                "age_s": dice.random() * 90_000,
                "idle_s": number * 41.0,
                "turns": dice.randrange(1, 60),
                "hits": dice.randrange(0, 50),
                "value": dice.random() / 1000,
                "saves_s": dice.random() * 30,
                "parked": True,
                "usable": True,
                "pinned": number % 11 == 1,
                "kept_until_s": 1_796_120_000.0 if number % 13 == 3 else None,
                "tier": "disk" if number % 9 == 5 else "ram",
            }
        )
        if words:
            made[-1]["first_words"] = {
                "system": "You are a careful assistant.",
                "user": NASTY if number == 0 else "Hello",
            }
    return {"conversations": made}


CAUSES = ("clock", "tools", "system", "edited", "evicted", "refused", "first")


def turns(count: int = 30, *, seed: int = 2) -> dict[str, Any]:
    dice = random.Random(seed)
    return {
        "turns": [
            {
                "request_id": f"req_{dice.getrandbits(96):024x}",
                "began": 1_796_116_000.0 - 613 * number,
                "client": dice.choice(["anna", "ci", "-"]),
                "prompt_tokens": 20_000 + 500 * number,
                "reused_tokens": dice.choice([0, 4_000, 20_000]),
                "cache": dice.choice(["live", "restored-ram", "restored-disk", "cold"]),
                "cause": CAUSES[number % len(CAUSES)],
                "needless_tokens": 16_000 if number % 2 else 0,
                "first_token_s": dice.random() * 20,
            }
            for number in range(count)
        ]
    }


def no_bill() -> dict[str, Any]:
    return {"total": {"tokens": 0, "seconds": 0.0}, "by_cause": [], "by_client": [], "by_day": []}


def bill() -> dict[str, Any]:
    return {
        "total": {"tokens": 1_482_113, "seconds": 4_312.0, "kwh": 0.41, "money": 0.14},
        "by_cause": [
            {"cause": cause, "tokens": 700_000 // (n + 1), "seconds": 2_000.0 / (n + 1)}
            for n, cause in enumerate(CAUSES)
        ],
        "by_client": [{"client": name, "tokens": 400_000, "seconds": 1_400.0} for name in ("anna", "ci", "-")],
        "by_day": [{"day": f"2026-11-{day}", "tokens": 100_000, "seconds": 90.0 * (day % 5)} for day in range(24, 31)],
    }
