"""What every official SDK must be able to do with every upstream: one function per ability, each through a driver of `drivers`.

An `Upstream` says what its model answers; the demo model and the mocks' brain are asked things that both know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import pytest

from drivers import DRIVERS, WEATHER, Said, Wish, status_of
from providers.brain import GREETING

COUNT = "Count from 1 to 30."
NUMBERS = ", ".join(str(number) for number in range(1, 31))
QUESTION = "What is the weather in Paris?"
RESULT = '{"temperature": 12, "condition": "rainy"}'


@dataclass
class Upstream:
    """Whatever answers, as a client sees it: where, with which key, under which name, and how it talks."""

    name: str
    url: str
    model: str
    key: str = "none"
    greeting: str = GREETING
    after_tool: str = f"The tool said: {RESULT}"
    # Follows instructions of the mocks' brain: repeats its system prompt, calls several tools at once, sees images.
    scripted: bool = True
    # Says which stop string it met.
    names_stop: bool = True
    # Its bytes pass through untouched, with the flaws they have.
    untouched: bool = False
    # Parameters that it cannot express, by ability: those are refused with 400.
    refuses: frozenset[str] = frozenset()
    # Rules that leave something out instead.
    drops: frozenset[str] = frozenset()

    def talk(self, dialect: str):
        """A new conversation through the SDK of a dialect."""
        return DRIVERS[dialect](self.url, self.key, self.model)


def told(up: Upstream, said: str) -> bool:
    """The answer after a tool says its result, however a library has wrapped and spelled it on the way. The demo model stumbles over
    what it never saw: from it, any answer counts."""
    return said == up.after_tool or ("rainy" in said and "12" in said if up.scripted else bool(said))


def ends(talk, said: Said, kind: str) -> None:
    assert said.finish == talk.finishes[kind], said


def text(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say("Hello")
    said = talk.ask(Wish(), stream)
    assert said.text == up.greeting and not said.calls, said
    ends(talk, said, "stop")
    assert said.input_tokens > 0 and said.output_tokens > 0, said
    if stream:
        assert said.pieces > 1, "a stream comes in pieces"


def turns(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say(COUNT)
    first = talk.ask(Wish(), stream)
    assert first.text.rstrip(".") == NUMBERS, first
    talk.say("Hello")
    second = talk.ask(Wish(), stream)
    assert second.text == up.greeting and second.input_tokens > first.input_tokens, second


def system(up: Upstream, dialect: str, stream: bool) -> None:
    rule = "You are a careful assistant. Ünïcode stays: 漢字 🦊."
    plain, told = up.talk(dialect), up.talk(dialect)
    for talk in (plain, told):
        talk.say("Repeat the system prompt" if up.scripted else "Hello")
    first = told.ask(Wish(system=rule), stream)
    if up.scripted:
        assert first.text == rule, first
    else:
        assert first.input_tokens > plain.ask(Wish(), stream).input_tokens


def tools(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say(QUESTION)
    first = talk.ask(Wish(tools=True), stream)
    assert first.calls == [(WEATHER[0], {"city": "Paris"})] and not first.text, first
    assert up.untouched or not first.blank, "content beside calls is null or says something"
    ends(talk, first, "tool_calls")
    talk.give(first, [RESULT])
    second = talk.ask(Wish(tools=True), stream)
    assert second.text == up.after_tool and not second.calls, second
    ends(talk, second, "stop")


def parallel_tools(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say("What is the weather in Paris and Rome?")
    first = talk.ask(Wish(tools=True), stream)
    assert [arguments["city"] for _, arguments in first.calls] == ["Paris", "Rome"], first
    assert len(set(first.ids)) == 2, first.ids
    talk.give(first, ["rainy", "sunny"])
    second = talk.ask(Wish(tools=True), stream)
    assert second.text == "The tool said: rainy | sunny", second
    # The conversation goes on after the tools.
    talk.say("Hello")
    assert talk.ask(Wish(tools=True), stream).text == up.greeting


def choices(up: Upstream, dialect: str, stream: bool) -> None:
    for choice, called in (("none", False), ("auto", False), ("required", True), (f"name:{WEATHER[0]}", True)):
        talk = up.talk(dialect)
        # A model of a few million parameters has no end in a call that nothing in the conversation asks for.
        talk.say("Hello" if up.scripted or not called else QUESTION)
        said = talk.ask(Wish(tools=True, choice=choice), stream)
        assert bool(said.calls) == called, (choice, said)


def one_call(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say("What is the weather in Paris and Rome?" if up.scripted else QUESTION)
    assert len(talk.ask(Wish(tools=True, parallel=False), stream).calls) == 1


def limit(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say(COUNT)
    said = talk.ask(Wish(max_tokens=20), stream)
    assert NUMBERS.startswith(said.text) and 0 < len(said.text) < len(NUMBERS), said
    assert said.output_tokens <= 20, said
    ends(talk, said, "length")


def stop(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say(COUNT)
    said = talk.ask(Wish(stop=[" 7"]), stream)
    assert said.text == "1, 2, 3, 4, 5, 6,", said
    ends(talk, said, "stop_sequence" if up.names_stop else "stop")


def image(up: Upstream, dialect: str, stream: bool) -> None:
    talk = up.talk(dialect)
    talk.say("Describe the image", image=True)
    assert talk.ask(Wish(), stream).text == "I see 1 image(s): image/png."


def form_of(answer: dict) -> dict:
    return {name: type(value) for name, value in answer.items()}


def form(up: Upstream, dialect: str, stream: bool) -> None:
    question, wanted = "Answer in JSON", {"city": "Paris", "temperature": 12}
    if not up.scripted:
        question, wanted = "Give me JSON with name and age: Alice is 31", {"name": "Alice", "age": 31}
    kinds = {str: "string", int: "integer"}
    bounds = {str: {"minLength": 1, "maxLength": 40}, int: {"minimum": -90, "maximum": 150}}
    # Clients of Anthropic's API close their schemas and leave bounds out, since it refuses others; nobody else has to. Its schemas are strict, and
    # a server that is not known to be OpenAI's is sent their bounds, which the mock refuses as OpenAI does.
    if dialect == "messages" and up.name in ("anthropic", "messages", "openai"):
        bounds = {str: {}, int: {}}
    properties = {name: {"type": kinds[type(value)], **bounds[type(value)]} for name, value in wanted.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    if dialect == "messages":
        schema["additionalProperties"] = False
    talk = up.talk(dialect)
    talk.say(question)
    said = talk.ask(Wish(json_schema=schema), stream)
    answer = json.loads(said.text)
    # The demo model holds to a grammar without knowing what to say in it: its form is what counts.
    assert answer == wanted or (not up.scripted and form_of(answer) == form_of(wanted)), said


def thinking(up: Upstream, dialect: str, stream: bool) -> None:
    """Reasoning comes apart from the answer, and what the provider wants back with it arrives there."""
    talk = up.talk(dialect)
    if not up.scripted:
        talk.say("What is 27 + 48?")
        said = talk.ask(Wish(thinking=True), stream)
        assert "75" in said.text, said
        assert "thinking" in up.drops or ("15" in said.thinking and "think>" not in said.text), said
        return
    talk.say("What is the weather in Paris? Think first.")
    first = talk.ask(Wish(thinking=True, tools=True, temperature=None), stream)
    assert first.calls, first
    if "thinking" not in up.drops:
        assert first.thinking == "Let me think about it. The person wants an answer.", first
    talk.give(first, [RESULT])
    second = talk.ask(Wish(thinking=True, tools=True, temperature=None), stream)
    assert second.text == up.after_tool, second


ABILITIES = {
    ability.__name__: ability
    for ability in (
        text,
        turns,
        system,
        tools,
        parallel_tools,
        choices,
        one_call,
        limit,
        stop,
        image,
        form,
        thinking,
    )
}
# What a dialect's clients cannot say at all.
UNSAYABLE = {("stop", "responses"), ("one_call", "generate"), ("choices", "ollama"), ("one_call", "ollama")}


def cells(dialects=tuple(DRIVERS)) -> list:
    """All that can be asked: dialect, ability, streamed or whole."""
    found = []
    for dialect in dialects:
        for ability in ABILITIES:
            if (ability, dialect) not in UNSAYABLE:
                found += [
                    pytest.param(dialect, ability, stream, id=f"{dialect}-{ability}-{'stream' if stream else 'whole'}")
                    for stream in (False, True)
                ]
    return found


# The mocks' abilities that a pool serving the demo model has not: nothing in a request asks for them.
SCRIPTED = {"parallel_tools"}


def run(up: Upstream, dialect: str, ability: str, stream: bool) -> None:
    """One cell: the ability works, or it is refused as the upstream's rules say."""
    if ability in SCRIPTED and not up.scripted:
        ability = "tools"
    act = partial(ABILITIES[ability], up, dialect, stream)
    if ability not in up.refuses:
        act()
        return
    talk = up.talk(dialect)
    with pytest.raises(talk.fault("bad_request")) as refused:
        act()
    assert status_of(refused.value) == 400, refused.value
