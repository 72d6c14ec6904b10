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


CAUSES = ("clock", "tools", "system", "history_edited", "evicted", "refused", "first_time")
RULE = {"name": "clock", "pattern": "[0-9]{2}:[0-9]{2}", "replacement": "noon", "roles": ["system"]}
NOW_S = 1_796_116_000.0


def turns(count: int = 30, *, words: bool = False, seed: int = 2) -> dict[str, Any]:
    dice, made = random.Random(seed), list[dict[str, Any]]()
    for number in range(count):
        prompt, reused = 20_000 + 50 * number, dice.choice([0, 4_000, 20_000])
        needless = (prompt - reused) * 3 // 4 if number % 2 else 0
        differs: dict[str, Any] = {"token": reused, "segment": "message 3 (user)"}
        if words:
            differs |= {"text": f"It is 12:{number:02} {NASTY}", "known_text": f"It is 09:41 {NASTY}"}
        made.append(
            {
                "at_s": NOW_S - 613 * number,
                "request_id": f"req_{dice.getrandbits(96):024x}",
                "conversation": None,
                "client": dice.choice(["claude-cli", "codex", ""]),
                "key": dice.choice(["anna", "-"]),
                "api": "/v1/messages",
                "cache": dice.choice(["live", "restored-ram", "restored-disk", "cold"]),
                "prompt_tokens": prompt,
                "reused_tokens": reused,
                "read_tokens": prompt - reused,
                "needless_tokens": needless,
                "output_tokens": 180,
                "seconds": {"wait": 0.2, "restore": 0.1, "read": 9.0, "needless": 7.0, "decode": 4.0},
                "needless_s": needless / 2_000,
                "end": "stop",
                "cause": CAUSES[number % len(CAUSES)],
                "why": f"differs from token {reused} in {NASTY if words else 'message 3 (user)'}" if needless else "",
                "differs": differs if needless else None,
                "rule": RULE if number % len(CAUSES) == 0 and needless else None,
            }
        )
    return {"since_s": NOW_S - 7 * DAY_S, "turns": made}


def _sum(tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "turns": 90,
        "prompt_tokens": 4 * tokens + 1,
        "reused_tokens": 3 * tokens,
        "read_tokens": tokens + 1,
        "needless_tokens": tokens,
        "read_s": 2 * seconds,
        "needless_s": seconds,
        "kwh": seconds / 9_000,
        "money": seconds / 27_000,
    }


def bill(count: int = 90) -> dict[str, Any]:
    line = '[[rule]]\nname = "clock"\npattern = "[0-9]{2}:[0-9]{2}"\nreplacement = "noon"\nroles = ["system"]'
    if count == 0:
        return {
            "since_s": 0.0,
            "total": _sum(0, 0.0) | {"turns": 0},
            "by_cause": [],
            "by_client": [],
            "by_day": [],
            "rules": [],
        }
    rule = {
        "rule": RULE,
        "line": line,
        "turns": 31,
        "needless_tokens": 700_000,
        "needless_s": 2_000.0,
        "request_id": "r",
    }
    return {
        "since_s": NOW_S - 7 * DAY_S,
        "total": _sum(1_482_113, 4_312.0),
        "by_cause": [{"cause": cause, **_sum(700_000 // n, 2_000.0 / n)} for n, cause in enumerate(CAUSES, 1)],
        "by_client": [{"client": name, **_sum(400_000, 1_400.0)} for name in ("claude-cli", "codex", "")],
        "by_day": [{"day": f"2026-11-{day}", **_sum(100_000, 90.0 * (day % 5))} for day in range(24, 31)],
        "rules": [rule],
    }
