"""The gate's result as JUnit XML, read by two stock parsers."""

from unicodedata import category
from xml.dom import minidom
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from compressor.evaluation.gate_report import junit
from compressor.evaluation.gate_verdict import EXIT_STATUS, GateResult
from tests.gates import gate, gates, likelihood, mixed, task

TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of what follows


def test_no_name_turns_the_direction_of_what_follows() -> None:
    hostile = gate(task(f"a{TURNS}b", "fail"), task(f"c{TURNS}", "inconclusive"), base=TURNS, options={TURNS: TURNS})
    made = junit(hostile).decode()
    assert not set(TURNS) & set(made) and made.count("\ufffd") > 8 * len(TURNS)


def test_junit_tells_each_task_and_the_whole() -> None:
    root = ElementTree.fromstring(junit(mixed()))
    (suite,) = root.findall("testsuite")
    for element in (root, suite):
        numbers = {name: int(element.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        assert numbers == {"tests": 4, "failures": 1, "errors": 0, "skipped": 1}
        assert float(element.attrib["time"]) == pytest.approx(50.75)
    cases = {case.attrib["name"]: case for case in suite.findall("testcase")}
    assert list(cases) == ["boolq", "rte", "openbookqa", "wikitext"]
    assert [name for name, case in cases.items() if case.find("failure") is not None] == ["rte"]
    assert [name for name, case in cases.items() if case.find("skipped") is not None] == ["openbookqa"]
    assert cases["rte"].find("failure").attrib["message"] == (  # type: ignore[union-attr]
        "acc dropped by +0.0800 (at least +0.0500, at most +0.1100); 0.01 is allowed"
    )
    properties = {each.attrib["name"]: each.attrib["value"] for each in suite.findall("properties/property")}
    assert properties["exit-status"] == "1" and properties["version.torch"] == "2.13.0"
    assert properties["option.limit"] == "500" and properties["max-drop"] == "0.01"
    for case in cases.values():
        text = case.findtext("system-out")
        assert text is not None and "drop: +" in text and "p of pass: " in text
    assert "option.num_fewshot" not in properties and not [case for case in cases.values() if "time" in case.attrib]
    timed = ElementTree.fromstring(junit(gate(task(), seconds={"boolq": 1.5})))
    assert timed[0].find("testcase").attrib["time"] == "1.500"  # type: ignore[union-attr]
    (wiki,) = ElementTree.fromstring(junit(gate(likelihood(verdict="fail")))).iter("failure")
    assert wiki.attrib["message"].endswith("at most +0.67%); 1% of perplexity is allowed")
    assert suite[0].tag == "properties"  # as the schema orders them


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_junit_says_how_the_command_ends(verdict: str) -> None:
    suite = ElementTree.fromstring(junit(gate(task(verdict=verdict))))[0]
    (status,) = (each for each in suite.iter("property") if each.attrib["name"] == "exit-status")
    assert int(status.attrib["value"]) == EXIT_STATUS[verdict]
    skipped = [each.attrib["message"] for each in suite.iter("skipped")]
    assert ["status 3" in message for message in skipped] == ([True] if verdict == "inconclusive" else [])


@settings(max_examples=60, deadline=None)
@given(gates())
def test_any_result_is_xml_to_two_parsers(result: GateResult) -> None:
    made = junit(result)
    cases = ElementTree.fromstring(made).findall("testsuite/testcase")
    other = minidom.parseString(made).getElementsByTagName("testcase")
    assert [case.attrib["name"] for case in cases] == [case.getAttribute("name") for case in other]
    assert len(cases) == len(result.tasks)
    for case, each in zip(cases, result.tasks, strict=True):
        allowed = all(category(letter) not in ("Cc", "Cn") and letter not in TURNS for letter in each.task)
        if allowed:
            assert case.attrib["name"] == each.task
        else:
            assert len(case.attrib["name"]) == len(each.task)
