"""The model behind every mock: what it answers follows from the request alone, so that all dialects can be compared.

It reads the last user turn for what to do:
  "weather in A and B"  calls the first tool, once for each city, when there are tools and it may
  "Count from 1 to N"   says the numbers
  "Repeat the system prompt", "Repeat: X", "Describe the image", "Answer in JSON", "Think first", "Decline"
and greets otherwise. After tool results it says what they were. A token is a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

GREETING = "Hello! How can I help you today? Ω≈ç 🦊 fine."


@dataclass
class Ask:
    """A request without its dialect."""

    system: str = ""
    user: str = ""
    # Texts of the tool results that end the conversation.
    results: list[str] = field(default_factory=list)
    # Tool names, in order.
    tools: list[str] = field(default_factory=list)
    # auto, none, required, or a tool's name after "name:".
    choice: str = "auto"
    parallel: bool = True
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    # Media types of image parts of the last user turn.
    images: list[str] = field(default_factory=list)
    thinking: bool = False
    json: bool = False
    # All texts, for the count of input tokens.
    texts: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """What is said. `finish`: stop, stop_sequence, length, tool_calls or refusal."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, dict]] = field(default_factory=list)
    finish: str = "stop"
    stop: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0


def words(text: str) -> list[str]:
    """Tokens: words with the blanks before them."""
    return re.findall(r"\s*\S+|\s+$", text)


def think(ask: Ask) -> Answer:
    """The answer to `ask`."""
    answer = Answer(input_tokens=sum(len(words(text)) for text in ask.texts) or 1)
    if ask.thinking:
        answer.thinking = "Let me think about it. The person wants an answer."
        answer.thinking_tokens = len(words(answer.thinking))
    answer.calls = _calls(ask)
    if answer.calls:
        answer.finish = "tool_calls"
        answer.output_tokens = answer.thinking_tokens + 8 * len(answer.calls)
        return answer
    if "Decline" in ask.user and not ask.results:
        answer.finish = "refusal"
    _limit(answer, _text(ask), ask)
    answer.output_tokens = answer.thinking_tokens + len(words(answer.text))
    return answer


def _calls(ask: Ask) -> list[tuple[str, dict]]:
    if not ask.tools or ask.choice == "none" or ask.results:
        return []
    asked = re.search(r"weather in (\w+)(?: and (\w+))?", ask.user)
    if ask.choice == "auto" and not asked:
        return []
    name = ask.choice.removeprefix("name:") if ask.choice.startswith("name:") else ask.tools[0]
    cities = [city for city in asked.groups() if city] if asked else ["Paris"]
    return [(name, {"city": city}) for city in (cities if ask.parallel else cities[:1])]


def _text(ask: Ask) -> str:
    if ask.results:
        return "The tool said: " + " | ".join(ask.results)
    if "Repeat the system prompt" in ask.user:
        return ask.system
    if match := re.search(r"Repeat: (.*)", ask.user, re.DOTALL):
        return match[1]
    if match := re.search(r"Count from 1 to (\d+)", ask.user):
        return ", ".join(str(number) for number in range(1, int(match[1]) + 1))
    if ask.images:
        return f"I see {len(ask.images)} image(s): {', '.join(ask.images)}."
    if ask.json:
        return '{"city":"Paris","temperature":12}'
    if "Decline" in ask.user:
        return "I will not do that."
    return GREETING


def _limit(answer: Answer, text: str, ask: Ask) -> None:
    """Stop strings and the token limit, as an engine applies them: the first of the two that is met ends the text."""
    ends = [(text.find(stop), stop) for stop in ask.stop if stop in text]
    cut, stop = min(ends, default=(None, None))
    limited = "".join(words(text)[: ask.max_tokens]) if ask.max_tokens is not None else text
    if cut is not None and cut <= len(limited):
        answer.text, answer.finish, answer.stop = text[:cut], "stop_sequence", stop
    elif len(limited) < len(text):
        answer.text, answer.finish = limited, "length"
    else:
        answer.text = text


def pieces(text: str) -> list[str]:
    """A text as a model streams it."""
    return words(text)


def split_json(text: str, size: int = 5) -> list[str]:
    """Arguments as a model streams them: in pieces that end anywhere."""
    return [text[start : start + size] for start in range(0, len(text), size)]
