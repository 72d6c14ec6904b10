"""Run as a script in a process of its own: compiles the grammar on standard input, within a number of seconds of CPU.

`trials.py` starts it. The grammar library cannot be interrupted, but a process can be ended. It needs no tokenizer of a
model: what may take for ever is turning a schema into automata, which happens before tokens matter.
"""

from __future__ import annotations

import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_BYTES = 4 << 30
"""Address space of the process. The automata of a schema may take all of a machine's memory."""


def main() -> None:
    bound(int(sys.argv[1]))
    grammar = LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    elif error := str(matcher.get_error()):
        sys.stdout.buffer.write(error.partition("\n")[0].encode("utf-8", "replace"))


def bound(cpu_s: int) -> None:
    """Lets the system end this process. Where it cannot, the parent's deadline is left."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    main()
