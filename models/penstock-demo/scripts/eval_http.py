#!/usr/bin/env python3
"""Evaluate the demo model skill by skill through an OpenAI-compatible endpoint, with the same prompts and checks as eval.py.

    python eval_http.py --url http://127.0.0.1:8080 --prompts 50

Tool calls and reasoning come back parsed; they are written out again in the model's own format before they are judged. With
`--expect ../eval.json` the exit status says whether the mean is within one point of that report's. Needs no packages.
"""

import argparse
import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import skills


def api_message(message, number):
    """A message as the API wants it."""
    calls = [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for index, call in enumerate(message.get("tool_calls", ()))
    ]
    out = {"role": message["role"], "content": message["content"]}
    if calls:
        out |= {"tool_calls": calls, "content": message["content"] or None}
    if message["role"] == "tool":
        out["tool_call_id"] = f"call_{number - 1}_0"
    return out


def request_of(item, model, limit):
    """Path and body of the request for an item."""
    body = {"model": model, "max_tokens": limit, "temperature": 0}
    if item.plain:
        return "/v1/completions", body | {"prompt": item.plain[0]}
    body["messages"] = [api_message(message, number) for number, message in enumerate(item.messages[:-1])]
    if item.tools:
        body["tools"] = item.tools
    if item.messages[-1].get("forced"):
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return "/v1/chat/completions", body


def text_of(choice):
    """The answer as the model wrote it."""
    if "text" in choice:
        return choice["text"]
    message = choice["message"]
    text = message.get("content") or ""
    if message.get("reasoning"):
        text = f"<think>\n{message['reasoning'].strip()}\n</think>\n\n{text}"
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    return text


def ask(args, item, limit):
    """Text of the answer and number of prompt tokens."""
    path, body = request_of(item, args.name, limit)
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(args.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    return text_of(answer["choices"][0]), answer["usage"]["prompt_tokens"]


def first_model(url):
    """The first model that the endpoint lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        return json.load(reply)["data"][0]["id"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="endpoint without /v1 (default: %(default)s)")
    parser.add_argument("--name", default="", help="model to ask for (default: the first one listed)")
    parser.add_argument("--prompts", type=int, default=50, help="per skill (default: %(default)s)")
    parser.add_argument("--seed", default="eval-2", help="of the prompts (default: %(default)s)")
    parser.add_argument("--skill", default="", metavar="A,B", help="only these skills")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N wrong answers per skill")
    parser.add_argument("--json", default="", metavar="FILE", help="write the report here")
    parser.add_argument("--expect", default="", metavar="FILE", help="fail unless within one point of this report")
    parser.add_argument("--parallel", type=int, default=16, help="requests at once (default: %(default)s)")
    args = parser.parse_args()
    args.name = args.name or first_model(args.url)
    started = time.time()
    report = skills.Report(args.seed, args.prompts, args.show)
    with ThreadPoolExecutor(args.parallel) as pool:
        for skill, items in skills.items(args.seed, args.prompts, args.skill):
            limit = skills.limit(skill)
            answers = list(pool.map(lambda item, limit=limit: ask(args, item, limit), items))
            texts, tokens = [text for text, _ in answers], [count for _, count in answers]
            report.add(skill, items, texts, sum(tokens) / len(tokens))
    mean = report.finish(args.json)
    print(f"{time.time() - started:.0f} s")
    if args.expect:
        with open(args.expect) as file:
            want = json.load(file)["mean_accuracy"]
        print(f"expected {100 * want:.1f} %, off by {100 * (mean - want):+.1f} points")
        sys.exit(abs(mean - want) > 0.01)


if __name__ == "__main__":
    main()
