#!/usr/bin/env python3
"""How readers of JSON understand spellings that the specification of an API leaves open: writes readers.json beside itself.

Needs `python3`, `node` and `go` (Debian: golang-go). The test `amounts.rs` reads the table; nothing else needs the interpreters.
"""

import json
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).parent

NUMBERS = """
16 0 -0 -1 -1.0 -1.5 16.0 16.5 1.6e1 1e2 1E+2 1e-1 4294967295 4294967296 2147483648 9007199254740993 18446744073709551616 1e400 -1e400
null "16" "" "-1" "null" true false [] [16] {} {"value":16}
""".split()

NAMES = r"""
max_tokens MAX_TOKENS Max_Tokens max_to\u212aens max_token\u017f MAX_TO\u212aEN\u017f max\u005ftokens max_tokens\u0000 maxTokens
""".split()

MODELS = ["model", "Model", "MODEL", r"mod\u0065l", r"model\u0000"]


def chat(fields: str) -> tuple[str, str]:
    return "chat", f'{{"model":"small",{fields}}}'


def gemini(fields: str) -> tuple[str, str]:
    return "gemini", f'{{"contents":[],{fields}}}'


def spellings() -> list[tuple[str, str]]:
    """Each as the API it is for and the body; every amount stands in the body for which it is read."""
    out = [chat(f'"max_tokens":{number}') for number in NUMBERS]
    out += [chat(f'"n":{number}') for number in NUMBERS]
    out += [gemini(f'"generationConfig":{{"maxOutputTokens":{number}}}') for number in NUMBERS]
    out += [gemini(f'"generationConfig":{{"candidateCount":{number}}}') for number in NUMBERS]
    for name in NAMES:
        out += [chat(f'"{name}":16'), chat(f'"max_tokens":8,"{name}":16'), chat(f'"{name}":16,"max_tokens":8')]
    out += [chat(f'"{name}":"big"') for name in MODELS]
    out += [("chat", f'{{"{name}":"big"}}') for name in MODELS[1:]]
    out += [("chat", f'{{"model":{value}}}') for value in ("null", "7", "true", '["big"]', '""')]
    out += [chat(f'"{name}":2') for name in ("N", r"\u006e", r"n\u0000")]
    out += [chat(f'"stream":{value}') for value in ("true", "null", "1", '"true"', '"false"', "[]")]
    out += [chat(f'"{name}":true') for name in ("Stream", "STREAM", r"\u017ftream")]
    for name in ("generationconfig", "GenerationConfig", r"generation\u0043onfig"):
        out.append(gemini(f'"{name}":{{"maxOutputTokens":16}}'))
        out.append(gemini(f'"generationConfig":{{"maxOutputTokens":8}},"{name}":{{"maxOutputTokens":16}}'))
    for name in ("maxoutputtokens", "MaxOutputTokens", r"maxOutputTo\u212aens", r"maxOutputToken\u017f"):
        out.append(gemini(f'"generationConfig":{{"{name}":16}}'))
        out.append(gemini(f'"generationConfig":{{"maxOutputTokens":8,"{name}":16}}'))
    out += [gemini(f'"generationConfig":{value}') for value in ("null", "{}", "{ }", "[]", '""', "7")]
    return out


def reading(value) -> str:
    """A value as this table writes it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            # As JavaScript writes numbers, except that a fraction of zero is kept: here it is another type.
            return str(value)
        case _:
            return json.dumps(value, separators=(",", ":"))


def field(within, name: str) -> str:
    if not isinstance(within, dict) or name not in within:
        return "absent"
    return reading(within[name])


def python(surface: str, body: str) -> dict:
    try:
        read = json.loads(body)
    except ValueError:
        return {"error": True}
    inner = read if surface == "chat" else read.get("generationConfig")
    bound, count = ("max_tokens", "n") if surface == "chat" else ("maxOutputTokens", "candidateCount")
    return {
        "model": field(read, "model"),
        "bound": field(inner, bound),
        "count": field(inner, count),
        "stream": "true" if read.get("stream") else "false",
    }


def others(command: list[str], rows: list[tuple[str, str]]) -> list[dict]:
    text = json.dumps([{"surface": surface, "body": body} for surface, body in rows])
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=HERE)
    return json.loads(answer.stdout)


def version(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1 - (command[0] == "go")]


def main() -> None:
    rows = spellings()
    go = others(["go", "run", "reader.go"], rows)
    javascript = others(["node", "reader.mjs"], rows)
    readers = {
        "python": platform.python_version(),
        "go": version("go", "version"),
        "javascript": f"node {version('node', '--version')}",
    }
    lines = [
        json.dumps(
            {"surface": surface, "body": body, "python": python(surface, body), "go": gos, "javascript": js},
        )
        for (surface, body), gos, js in zip(rows, go, javascript, strict=True)
    ]
    text = '{"readers": ' + json.dumps(readers) + ',\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"
    (HERE / "readers.json").write_text(text)


if __name__ == "__main__":
    main()
