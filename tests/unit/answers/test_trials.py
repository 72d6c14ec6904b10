"""Schemas that would keep the grammar library busy for long: ended, or refused before it sees them."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.grammar import json_rule
from parkd.answers.structured import StructuredOutput
from parkd.answers.trials import Trials, is_costly
from parkd.errors import Cancelled, InvalidRequest, SchemaTooComplex
from parkd.types import FormKind, TextForm, ToolChoice, ToolChoiceMode, TurnRequest
from tests.unit.answers.test_structured import END, VOCAB_SIZE, tokenizer

FORMAT = OutputFormat(ToolFormat.HERMES)
STRING = {"type": "string"}
TOGETHER = {"allOf": [{"type": "string", "pattern": f".*a{{{count}}}.*b"} for count in range(1, 25)]}
"""Whether one text can match all of these patterns takes the library longer than anyone would wait."""
LONGEST_S = 8.0
"""Seconds of CPU of this process, generously. Without the mends it is more than a minute, or no end at all."""


def structured() -> StructuredOutput:
    made = StructuredOutput(tokenizer(special=True).to_str(), VOCAB_SIZE, frozenset({END}))
    made.prepare()
    return made


def properties(count: int, value: Any = STRING) -> dict[str, Any]:
    return {f"p{index}": value for index in range(count)}


def refused(request: TurnRequest) -> InvalidRequest:
    made, began_s = structured(), time.process_time()
    with pytest.raises(InvalidRequest) as error:
        made.mask(request, FORMAT, "")
    assert time.process_time() - began_s < LONGEST_S
    return error.value


def test_the_fault_of_a_large_schema_is_found_in_seconds() -> None:
    """Found by use 4: the search for the faulty part took 90 s of CPU, quadratic in the schema."""
    schema = {
        "type": "object",
        "properties": {**properties(3999), "last": {"not": STRING}},
        "$defs": properties(4000, {"type": "object", "properties": {"a": STRING, "b": STRING}}),
    }
    error = refused(TurnRequest(response_schema=schema))
    assert error.param == "schema.properties.last"
    assert "not" in error.message


def test_the_first_of_several_faults_is_named_wherever_it_is() -> None:
    """The search halves the parts; it finds what looking at one after the other would."""
    for place in (0, 1, 4, 6):
        parts = {name: {"not": STRING} if index >= place else STRING for index, name in enumerate("abcdefg")}
        error = refused(TurnRequest(response_schema={"type": "object", "properties": parts}))
        assert error.param == f"schema.properties.{'abcdefg'[place]}"


def test_what_compiles_without_end_is_ended_in_a_process_of_its_own() -> None:
    """Found by use 4: nothing ended the compilation of patterns that must hold together."""
    error = refused(TurnRequest(response_schema=TOGETHER))
    assert isinstance(error, SchemaTooComplex)
    assert error.param == "response_format"
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": TOGETHER}}},
    }
    forced = TurnRequest(tools=[tool], tool_choice=ToolChoice(ToolChoiceMode.REQUIRED))
    assert refused(forced).param == "tools"


def test_a_form_is_tried_too() -> None:
    """Found by use 4: a client's own regular expression or grammar compiles in the library as well."""
    slow = " & ".join(f"/.*a{{{count}}}.*b/" for count in range(1, 25))
    form = TextForm(FormKind.GRAMMAR, f"start: TEXT\nTEXT: {slow}\n", "grammar")
    error = refused(TurnRequest(response_form=form))
    assert (type(error), error.param) == (SchemaTooComplex, "grammar")


def test_many_divisors_are_as_costly_as_a_large_one() -> None:
    """Found by use 4: each divisor had a bound, but not their sum: twenty of 99,991 took more than a minute."""
    many = {f"p{index}": {"type": "integer", "multipleOf": 99_991 - 2 * index} for index in range(20)}
    assert isinstance(refused(TurnRequest(response_schema={"type": "object", "properties": many})), SchemaTooComplex)


def test_a_trial_is_made_once_and_only_for_what_may_be_costly() -> None:
    made = structured()
    request = TurnRequest(response_schema={"type": "string", "pattern": "^[a-z]{2,5}$"})
    for _ in range(3):
        assert made.mask(request, FORMAT, "") is not None
    assert made.trials.count == 1
    made.mask(TurnRequest(response_schema={"type": "object", "properties": properties(30)}), FORMAT, "")
    assert made.trials.count == 1


def test_the_deadline_ends_a_trial_too() -> None:
    trials = Trials(cpu_s=60, wall_s=0.5)
    with pytest.raises(SchemaTooComplex):
        trials.check(f"start: {json_rule(TOGETHER)}\n", "response_format", "")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": properties(100)}, False),
        ({"type": "object", "properties": properties(600)}, True),
        ({"properties": {"a": {"items": {"pattern": "a"}}}}, True),
        ({"anyOf": [STRING, {"oneOf": [STRING]}]}, True),
        ({"anyOf": [STRING, {"enum": ["pattern"]}]}, False),
        (True, False),
    ],
)
def test_what_may_be_costly(schema: Any, expected: bool) -> None:
    assert is_costly(schema) is expected


def test_found_by_use_2_a_schema_is_tried_for_each_namespace_that_sends_it() -> None:
    """The trial takes tens of milliseconds, and was not repeated for another key."""
    trials = Trials(namespaces=2)
    grammar = "start: /a+b/\n"
    counts = []
    for namespace in ("alice", "alice", "bob", "bob/salt", "bob", "alice"):
        before = trials.count
        assert trials.check(grammar, "regex", namespace) == ""
        counts.append(trials.count - before)
    assert counts == [1, 0, 1, 1, 0, 0]
    assert 0 < trials.memory_bytes <= trials.limit_bytes


def test_found_by_use_4_the_process_of_a_trial_ends_when_its_client_leaves() -> None:
    """It ran for its 3 s of CPU, up to 20 s, though nobody waited for it."""
    trials, asked = Trials(cpu_s=60, wall_s=60), []

    def still_wanted() -> None:
        asked.append(psutil.Process().children())
        if len(asked) > 3:
            raise Cancelled("The client left.")

    with pytest.raises(Cancelled):
        trials.check(f"start: {json_rule(TOGETHER)}\n", "response_format", "", still_wanted)
    (process,) = set(asked[-1]) - {child for child in psutil.Process().children() if child.is_running()}
    assert not process.is_running()
    with pytest.raises(Cancelled):
        trials.check(f"start: {json_rule(TOGETHER)}\n", "response_format", "", still_wanted)
    assert trials.count == 2, "nothing was learnt of it"
